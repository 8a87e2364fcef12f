// Combines partials into outputs, for combine.cu and packed_combine.cu: a column is a query and a query head.
//
// A warp takes a batch of partials at a time: each lane computes the weight of one, then all lanes read their dims of every
// one. Partials of quantised tiers are summed in the rotated space and rotated back once.
//
// A kernel that has room to start while decode still runs (P::kRehearses) runs twice: before its wait without loads and stores
// (`live` is false), so that its machine code is in the instruction cache, and then for real.
#pragma once
#include "divide.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "warp.cuh"
#include "work.cuh"

using i64 = long long;

#define kInfinity __int_as_float(0x7f800000)
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ void scale(float4& x, float by) { x.x *= by, x.y *= by, x.z *= by, x.w *= by; }
__device__ __forceinline__ void add(float4& x, float weight, const float4& y) {
  x.x += weight * y.x, x.y += weight * y.y, x.z += weight * y.z, x.w += weight * y.w;
}

__device__ __forceinline__ float butterfly(float mine, float other, bool second) {
  return second ? other - mine : mine + other;
}

template <class P> constexpr bool kTwice = P::kRehearses && kOverlaps;
template <class P> __device__ __forceinline__ unsigned passes() { return kTwice<P> ? opaque(2) : 2; }  // two copies otherwise

// Indices of a column from its number over all rows and heads.
struct Column {
  int head_cache, number, row, query, kv_head, head;
  template <class P>
  __device__ __forceinline__ Column(const P& p, int of_all) {
    head_cache = divide(of_all, p.by_columns);
    number = of_all - head_cache * p.queries * p.group;
    row = divide(head_cache, p.by_kv_heads);
    query = divide(number, p.by_group);
    kv_head = head_cache - row * p.kv_heads;
    head = kv_head * p.group + number - query * p.group;
  }
  template <class P>
  __device__ __forceinline__ i64 place(const P& p) const {
    return (p.first_query(row) + query) * (p.kv_heads * p.group) + head;
  }
};

// Slots of the partials of a head cache; lane t holds those of tier t.
struct Found {
  Slots mine;
  int all, plain;

  // May be read before the grid dependency wait: the previous kernel already waited for the list. The partials may not.
  template <class P>
  __device__ __forceinline__ Found(const P& p, const Column& column) {
    mine = p.slots_of(column);
    all = mine.count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) all += __shfl_xor_sync(~0u, all, d);
    plain = __shfl_sync(~0u, mine.count, 0);
  }

  __device__ __forceinline__ int slot(int number, int tiers) const {
    int slot = -1;
#pragma unroll 1
    for (int t = 0; t < tiers; t++) {
      const int count = __shfl_sync(~0u, mine.count, t), begin = __shfl_sync(~0u, mine.first, t);
      if (slot < 0 && number < count) slot = begin + number;
      number -= count;
    }
    return slot;
  }
};

// Score of K's centre, in log2 units, to add to every score of codes of a column. May also be read before the wait.
template <class In, int kDim, class P>
__device__ __forceinline__ float centre_score(const P& p, const Column& column) {
  if (!p.centre) return 0.f;
  const char* q = p.q + p.query_offset(column.row) + column.query * p.q_query + column.head * p.q_head;
  const float* centre = p.centre_of(column.row) + column.kv_head * kDim;
  float dot = 0.f;
#pragma unroll
  for (int d = 2 * (threadIdx.x & 31); d < kDim; d += 64) {
    const unsigned pair = *reinterpret_cast<const unsigned*>(q + d * 2);
    const float2 c = *reinterpret_cast<const float2*>(centre + d);
    float x = to_float(In{static_cast<unsigned short>(pair)}), y = to_float(In{static_cast<unsigned short>(pair >> 16)});
    if constexpr (P::kBalances)
      if (p.balance) {
        const float2 by = *reinterpret_cast<const float2*>(p.balance + column.kv_head * kDim + d);
        x *= by.x, y *= by.y;
      }
    dot += x * c.x;
    dot += y * c.y;
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) dot += __shfl_xor_sync(~0u, dot, d);
  const float score = dot * p.scale_log2;
  return fabsf(score) < kInfinity ? score : 0.f;  // a query that is not finite; neither are its partials
}

// Running sums of a warp over one column: lane l holds dims 4l + 128j, [0] from plain rows (kRows) and [1] from codes.
template <int kDim, bool kRows>
struct Sums {
  static constexpr int kPer = (kDim + 127) / 128, kFirst = kRows ? 0 : 1;
  float m = -kInfinity, sum = 0.f;
  float4 out[2][kPer];

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int j = 0; j < kPer; j++) out[0][j] = out[1][j] = make_float4(0.f, 0.f, 0.f, 0.f);
  }

  // Adds partials first, first + step, .., kAhead at a time. `slot` is the slot of the lane's first one.
  template <int kAhead, class P>
  __device__ __forceinline__ void add_all(const P& p, const Found& found, float centre, int column, int first, int step,
                                          int slot, bool live) {
    constexpr int kHalf = kAhead > 8 ? kAhead / 2 : kAhead;  // the second half is skipped if the first is enough
    const int lane = threadIdx.x & 31;
    const int stride = p.blocks * p.block_columns;
    const float* outs = p.partial_out + column * kDim + 4 * lane;
    for (; first < found.all; first += step * kAhead) {
      float4 value[kAhead][kPer];
#pragma unroll
      for (int half = 0; half < kAhead; half += kHalf)
        if (!half || first + half * step < found.all) {
#pragma unroll
          for (int a = half; a < half + kHalf; a++) {
            // The first slot instead of none, to avoid a branch: what is read there does not count.
            const i64 from = static_cast<i64>(max(__shfl_sync(~0u, slot, a), 0)) * (stride * kDim);
#pragma unroll
            for (int j = 0; j < kPer; j++) {
              value[a][j] = make_float4(0.f, 0.f, 0.f, 0.f);
              if (live && 4 * lane + 128 * j < kDim) value[a][j] = *reinterpret_cast<const float4*>(outs + from + 128 * j);
            }
          }
        }
      const bool mine = live && slot >= 0 && lane < kAhead, plain = kRows && first + lane * step < found.plain;
      const float2 part = mine ? p.partial_sum[static_cast<i64>(slot) * stride + column] : make_float2(0.f, 0.f);
      slot = found.slot(first + (kAhead + lane) * step, p.tiers);
      const float reference = part.y != 0.f ? part.x + (plain ? 0.f : centre) : -kInfinity;  // 0: the partial saw no token
      float top = fmaxf(m, reference);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      const float from = top > -kInfinity ? top : 0.f, before = exp2f(m - from), weight = exp2f(reference - from);
      float more = weight * part.y;
#pragma unroll
      for (int d = 1; d < kAhead; d *= 2) more += __shfl_xor_sync(~0u, more, d);
      m = top;
      sum = sum * before + __shfl_sync(~0u, more, 0);
#pragma unroll
      for (int kind = kFirst; kind < 2; kind++)
#pragma unroll
        for (int j = 0; j < kPer; j++) scale(out[kind][j], before);
#pragma unroll
      for (int half = 0; half < kAhead; half += kHalf)
        if (!half || first + half * step < found.all) {
#pragma unroll
          for (int a = half; a < half + kHalf; a++) {
            const float of_rows = kRows ? __shfl_sync(~0u, plain ? weight : 0.f, a) : 0.f;
            const float of_codes = __shfl_sync(~0u, plain ? 0.f : weight, a);
            const bool counts = of_rows + of_codes != 0.f;  // otherwise its memory may hold anything
#pragma unroll
            for (int j = 0; j < kPer; j++) {
              const float4 x = counts ? value[a][j] : make_float4(0.f, 0.f, 0.f, 0.f);
              if constexpr (kRows) add(out[0][j], of_rows, x);
              add(out[1][j], of_codes, x);
            }
          }
        }
      if (!live) return;
    }
  }
};

// Writes a column's output: adds sinks, rotates the part from codes back, normalises.
template <class In, int kDim, bool kRows, class P>
__device__ __forceinline__ void finish(const P& p, const Column& column, Sums<kDim, kRows>& s, bool live) {
  constexpr int kBlock = kDim & -kDim, kPer = Sums<kDim, kRows>::kPer;
  const int lane = threadIdx.x & 31;
  if (p.sinks) {
    const float sink = p.sinks[column.head] * kLog2e, top = fmaxf(sink, s.m);
    if (top > -kInfinity) {
      const float before = exp2f(s.m - top);
      s.sum = s.sum * before + exp2f(sink - top);
      s.m = top;
#pragma unroll
      for (int j = 0; j < kPer; j++) scale(s.out[0][j], before), scale(s.out[1][j], before);
    }
  }
#pragma unroll
  for (int j = 0; j < kPer; j++) {
    float4& x = s.out[1][j];
    x = make_float4(x.x + x.y, x.x - x.y, x.z + x.w, x.z - x.w);
    x = make_float4(x.x + x.z, x.y + x.w, x.x - x.z, x.y - x.w);
#pragma unroll
    for (int d = 1; d < 32 && 4 * d < kBlock; d *= 2) {
      const bool second = lane & d;
      x.x = butterfly(x.x, __shfl_xor_sync(~0u, x.x, d), second);
      x.y = butterfly(x.y, __shfl_xor_sync(~0u, x.y, d), second);
      x.z = butterfly(x.z, __shfl_xor_sync(~0u, x.z, d), second);
      x.w = butterfly(x.w, __shfl_xor_sync(~0u, x.w, d), second);
    }
  }
  if constexpr (kBlock > 128) {
    const float4 a = s.out[1][0], b = s.out[1][kPer - 1];
    s.out[1][0] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    s.out[1][kPer - 1] = make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w);
  }
  const i64 to = column.place(p);
  const float by = s.sum != 0.f ? 1.f / s.sum : 0.f, longer = rsqrtf(static_cast<float>(kBlock));
#pragma unroll
  for (int j = 0; j < kPer; j++) {
    const int d = 4 * lane + 128 * j;
    const float4 plain = s.out[0][j], x = s.out[1][j];
    if (live && d < kDim)
      *reinterpret_cast<uint2*>(p.out + to * kDim + d) =
          make_uint2(pair_of(In{}, (plain.x + x.x * longer) * by, (plain.y + x.y * longer) * by),
                     pair_of(In{}, (plain.z + x.z * longer) * by, (plain.w + x.w * longer) * by));
  }
  if (live && p.lse && lane == 0) p.lse[to] = s.sum != 0.f ? (s.m + log2f(s.sum)) * kLn2 : -kInfinity;
}

// One warp per column; kAhead partials at a time.
template <class In, int kDim, int kAhead, class P>
__device__ __forceinline__ void combine_column_alone(const P& p) {
  const Column column(p, blockIdx.x * 4 + (threadIdx.x >> 5));
  if (column.head_cache >= p.head_caches || column.query >= p.queries_of(column.row)) return;
  const Found found(p, column);
  const int slot = found.slot(threadIdx.x & 31, p.tiers);
  const float centre = centre_score<In, kDim>(p, column);
#pragma unroll 1
  for (unsigned live = !kTwice<P>; live < passes<P>(); live++) {
    if (live) {
      wait_for_previous();
      release_next();
    }
    Sums<kDim, P::kRows> s;
    s.template add_all<kAhead / Sums<kDim, P::kRows>::kPer>(p, found, centre, column.number, 0, 1, slot, live);
    finish<In>(p, column, s, live);
  }
}

// One block per column; kAhead partials of a warp at a time.
template <class In, int kDim, int kWarps, int kAhead, class P>
__device__ __forceinline__ void combine_column(const P& p) {
  constexpr int kPer = Sums<kDim, P::kRows>::kPer, kFirst = Sums<kDim, P::kRows>::kFirst;
  constexpr int kGroup = kWarps <= 4 ? 4 : kWarps <= 8 ? 8 : kWarps <= 16 ? 16 : 32;  // lanes that sum up the warps
  __shared__ float2 sums[kWarps];  // m and sum of each warp
  __shared__ float4 outs[2 - kFirst][kPer][kWarps][32];
  const Column column(p, blockIdx.x);
  if (column.query >= p.queries_of(column.row)) return;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Found found(p, column);
  const int slot = found.slot(warp + lane * kWarps, p.tiers);
  const float centre = centre_score<In, kDim>(p, column);
#pragma unroll 1
  for (unsigned live = !kTwice<P>; live < passes<P>(); live++) {
    if (live) {
      wait_for_previous();
      release_next();
      __syncthreads();  // the first warp may still read what the others wrote in the previous pass
    }
    Sums<kDim, P::kRows> s;
    s.template add_all<kAhead>(p, found, centre, column.number, warp, kWarps, slot, live);
    if (lane == 0) sums[warp] = make_float2(s.m, s.sum);
#pragma unroll
    for (int kind = kFirst; kind < 2; kind++)
#pragma unroll
      for (int j = 0; j < kPer; j++) outs[kind - kFirst][j][warp][lane] = s.out[kind][j];
    __syncthreads();
    if (warp) continue;
    const int of = lane % kGroup;
    const float2 part = of < kWarps ? sums[of] : make_float2(-kInfinity, 0.f);
    s.m = part.x;
#pragma unroll
    for (int d = 1; d < kGroup; d *= 2) s.m = fmaxf(s.m, __shfl_xor_sync(~0u, s.m, d));
    const float weight = part.x > -kInfinity ? exp2f(part.x - s.m) : 0.f;
    s.sum = weight * part.y;
#pragma unroll
    for (int d = 1; d < kGroup; d *= 2) s.sum += __shfl_xor_sync(~0u, s.sum, d);
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const float by = __shfl_sync(~0u, weight, w);
#pragma unroll
      for (int kind = kFirst; kind < 2; kind++)
#pragma unroll
        for (int j = 0; j < kPer; j++) {
          if (w == 0) scale(s.out[kind][j], by);
          else add(s.out[kind][j], by, outs[kind - kFirst][j][w][lane]);
        }
    }
    finish<In>(p, column, s, live);
  }
}
