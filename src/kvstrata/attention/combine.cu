// The partial results of decode.cu to outputs. A column is a query and a query head.
//
//   combine        a block makes a column: its warps share out the partial results and are put together at the end
//   combine_alone  a warp makes a column: where there are few partial results a block would mostly put itself together
//
// A warp takes some partial results at a time: a lane finds one's weight, all lanes read their dims of it. What comes from
// quantised tiers is added up in the rotated space and rotated back once. Few registers and threads: so a block finds
// room beside decode.cu's and waits there for its end.
#include "mma.cuh"
#include "pdl.cuh"
#include "work.cuh"

using i64 = long long;

struct Params {
  const float* partial_out;    // [slots, column blocks, columns of a block, D]
  const float2* partial_sum;   // the same without D: reference m and sum l, both in powers of two
  const Slots* slots;          // [tiers, rows * kv heads]
  unsigned short* out;         // [rows, queries, heads, D]
  float* lse;                  // [rows, queries, heads], or null
  const float* sinks;          // [heads], or null
  int queries, group, kv_heads, blocks, block_columns, tiers, units;
};

#define kInfinity __int_as_float(0x7f800000)
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ void scale(float4& x, float by) { x.x *= by, x.y *= by, x.z *= by, x.w *= by; }
__device__ __forceinline__ void add(float4& x, float weight, const float4& y) {
  x.x += weight * y.x, x.y += weight * y.y, x.z += weight * y.z, x.w += weight * y.w;
}

__device__ __forceinline__ float butterfly(float mine, float other, bool second) {
  return second ? other - mine : mine + other;
}

// Where the partial results of a unit are, tier by tier: lane t has those of tier t.
struct Found {
  Slots mine;
  int all, plain;

  // The list is older than the kernel before this one, which waited for it; the partial results are not.
  __device__ __forceinline__ Found(const Params& p, int unit) {
    const int lane = threadIdx.x & 31;
    mine.first = mine.count = 0;
    if (lane < p.tiers) {
      const int2 found = __ldcg(reinterpret_cast<const int2*>(p.slots) + lane * p.units + unit);
      mine.first = found.x, mine.count = found.y;
    }
    all = mine.count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) all += __shfl_xor_sync(~0u, all, d);
    plain = __shfl_sync(~0u, mine.count, 0);
  }

  __device__ __forceinline__ int slot(int number, int tiers) const {
    int slot = -1;
    for (int t = 0; t < tiers; t++) {
      const int count = __shfl_sync(~0u, mine.count, t), begin = __shfl_sync(~0u, mine.first, t);
      if (slot < 0 && number < count) slot = begin + number;
      number -= count;
    }
    return slot;
  }
};

// What a warp has added up of a column: lane l has dims 4l + 128j, [0] of plain rows and [1] of codes.
template <int kDim>
struct Sums {
  static constexpr int kPer = (kDim + 127) / 128;
  float m = -kInfinity, sum = 0.f;
  float4 out[2][kPer];

  __device__ __forceinline__ Sums() {
#pragma unroll
    for (int j = 0; j < kPer; j++) out[0][j] = out[1][j] = make_float4(0.f, 0.f, 0.f, 0.f);
  }

  // Partial results first, first + step ..
  template <int kAhead>
  __device__ __forceinline__ void add_all(const Params& p, const Found& found, int column, int first, int step) {
    const int lane = threadIdx.x & 31;
    const i64 stride = static_cast<i64>(p.blocks) * p.block_columns;
    for (; first < found.all; first += step * kAhead) {
      int slot = found.slot(first + lane * step, p.tiers);
      if (lane >= kAhead) slot = -1;
      float4 value[kAhead][kPer];
#pragma unroll
      for (int a = 0; a < kAhead; a++) {
        const int from = __shfl_sync(~0u, slot, a);
#pragma unroll
        for (int j = 0; j < kPer; j++) {
          const int d = 4 * lane + 128 * j;
          value[a][j] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (from >= 0 && d < kDim)
            value[a][j] = *reinterpret_cast<const float4*>(p.partial_out + (from * stride + column) * kDim + d);
        }
      }
      const float2 part = slot >= 0 ? p.partial_sum[slot * stride + column] : make_float2(0.f, 0.f);
      const float reference = part.y != 0.f ? part.x : -kInfinity;  // 0: nothing was seen
      float top = fmaxf(m, reference);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      if (top == -kInfinity) continue;
      const float before = exp2f(m - top), weight = exp2f(reference - top);
      float more = weight * part.y;
#pragma unroll
      for (int d = 1; d < kAhead; d *= 2) more += __shfl_xor_sync(~0u, more, d);
      m = top;
      sum = sum * before + __shfl_sync(~0u, more, 0);
#pragma unroll
      for (int kind = 0; kind < 2; kind++)
#pragma unroll
        for (int j = 0; j < kPer; j++) scale(out[kind][j], before);
#pragma unroll
      for (int a = 0; a < kAhead; a++) {
        const float now = __shfl_sync(~0u, weight, a);
        const bool plain = first + a * step < found.plain;
        if (now == 0.f) continue;  // whatever it holds
#pragma unroll
        for (int j = 0; j < kPer; j++) {
          if (plain) add(out[0][j], now, value[a][j]);
          else add(out[1][j], now, value[a][j]);
        }
      }
    }
  }
};

template <class In, int kDim>
__global__ void __launch_bounds__(128) combine_alone(const __grid_constant__ Params p) {
  constexpr int kBlock = kDim & -kDim, kPer = Sums<kDim>::kPer;
  const int columns = p.queries * p.group, number = blockIdx.x * 4 + (threadIdx.x >> 5);
  const int unit = number / columns, column = number % columns, lane = threadIdx.x & 31;
  if (unit >= p.units) return;
  const Found found(p, unit);
  wait_for_previous();
  release_next();
  Sums<kDim> s;
  s.template add_all<8 / kPer>(p, found, column, 0, 1);
  const int head = unit % p.kv_heads * p.group + column % p.group;
  if (p.sinks) {
    const float sink = p.sinks[head] * kLog2e, top = fmaxf(sink, s.m);
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
  const i64 to = (static_cast<i64>(unit / p.kv_heads) * p.queries + column / p.group) * (p.kv_heads * p.group) + head;
  const float by = s.sum != 0.f ? 1.f / s.sum : 0.f, longer = rsqrtf(static_cast<float>(kBlock));
#pragma unroll
  for (int j = 0; j < kPer; j++) {
    const int d = 4 * lane + 128 * j;
    const float4 plain = s.out[0][j], x = s.out[1][j];
    if (d < kDim)
      *reinterpret_cast<uint2*>(p.out + to * kDim + d) =
          make_uint2(pair_of(In{}, (plain.x + x.x * longer) * by, (plain.y + x.y * longer) * by),
                     pair_of(In{}, (plain.z + x.z * longer) * by, (plain.w + x.w * longer) * by));
  }
  if (p.lse && lane == 0) p.lse[to] = s.sum != 0.f ? (s.m + log2f(s.sum)) * kLn2 : -kInfinity;
}

template <class In, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 4 ? 9 : 1) combine(const __grid_constant__ Params p) {
  constexpr int kPer = Sums<kDim>::kPer, kRows = kPer * 128;
  static_assert(kWarps * 32 >= kDim && kDim % 4 == 0, "a thread for every dim");
  __shared__ float tops[kWarps], sums[kWarps];
  __align__(16) __shared__ float outs[2][kWarps][kRows];
  const int columns = p.queries * p.group, unit = blockIdx.x / columns, column = blockIdx.x % columns;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int head = unit % p.kv_heads * p.group + column % p.group;
  const Found found(p, unit);
  wait_for_previous();
  release_next();

  Sums<kDim> s;
  s.template add_all<(kWarps > 8 ? 8 : 4)>(p, found, column, warp, kWarps);
#pragma unroll
  for (int kind = 0; kind < 2; kind++)
#pragma unroll
    for (int j = 0; j < kPer; j++) *reinterpret_cast<float4*>(&outs[kind][warp][4 * lane + 128 * j]) = s.out[kind][j];
  if (lane == 0) tops[warp] = s.m, sums[warp] = s.sum;
  __syncthreads();

  const float sink = p.sinks ? p.sinks[head] * kLog2e : -kInfinity;
  float m = sink;
#pragma unroll
  for (int w = 0; w < kWarps; w++) m = fmaxf(m, tops[w]);
  const int d = threadIdx.x;
  float plain = 0.f, x = 0.f;
  float sum = sink > -kInfinity ? exp2f(sink - m) : 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++)
    if (sums[w] != 0.f) {
      const float weight = exp2f(tops[w] - m);
      sum += weight * sums[w];
      if (d < kRows) {
        plain += weight * outs[0][w][d];
        x += weight * outs[1][w][d];
      }
    }
  // Butterflies at distance 1, 2, 4 .. of the block, each value in its own thread.
  constexpr int kBlock = kDim & -kDim;
#pragma unroll
  for (int distance = 1; distance < kBlock; distance *= 2) {
    float other;
    if (distance < 32) {
      other = __shfl_xor_sync(~0u, x, distance);
    } else {
      __syncthreads();
      if (d < kDim) outs[1][0][d] = x;
      __syncthreads();
      other = d < kDim ? outs[1][0][d ^ distance] : 0.f;
    }
    x = butterfly(x, other, d & distance);
  }
  if (d >= kDim) return;
  const i64 to = (static_cast<i64>(unit / p.kv_heads) * p.queries + column / p.group) * (p.kv_heads * p.group) + head;
  const float value = sum != 0.f ? (plain + x * rsqrtf(static_cast<float>(kBlock))) / sum : 0.f;
  p.out[to * kDim + d] = static_cast<unsigned short>(pair_of(In{}, value, 0.f));
  if (p.lse && d == 0) p.lse[to] = sum != 0.f ? (m + log2f(sum)) * kLn2 : -kInfinity;
}
