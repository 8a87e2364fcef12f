// The queries of a KV head as operands: unchanged for plain rows; rotated and scaled to the range of fp16 for codes.
#pragma once
#include "decode_state.cuh"
#include "rotation.cuh"
#include "warp.cuh"

// Dims of the plain product: element e of a lane's chunk of step s. Chunks are 16 bytes of a pair of steps, and 8 bytes
// of a last odd step, so that a lane loads them at once.
template <int kDim>
__device__ __forceinline__ int plain_dim(int s, int part) {
  const int t = threadIdx.x & 3;
  if (kDim % 32 && s == kDim / 16 - 1) return 16 * s + 4 * t + 2 * part;
  return 32 * (s / 2) + 8 * t + 4 * (s % 2) + 2 * part;
}

// Row and KV head of a stage.
struct Owner {
  int row, head;
  __device__ __forceinline__ Owner(const Params& p, const Stage& stage) {
    const int head_cache = stage.bucket - tier_of(stage.meta) * p.head_caches;
    row = divide(head_cache, p.by_kv_heads);
    head = head_cache - row * p.kv_heads;
  }
};

template <class P>
__device__ __forceinline__ const char* query_of(const P& p, const Owner& owner, int column) {
  const int query = divide(column, p.by_group);
  return p.query_row(owner.row) + query * p.q_query + (owner.head * p.group + column - query * p.group) * p.q_head;
}

// Prefetches the memory that load_query will read, one line of 128 bytes per lane.
template <int kDim, int kN, class P>
__device__ __forceinline__ void expect_query(const P& p, const Stage& stage, int block) {
  constexpr int kLines = (kDim * 2 + 127) / 128;
  static_assert(8 * kN * kLines <= 32, "a lane for each line");
  const int lane = threadIdx.x & 31, column = block * kN * 8 + lane / kLines;
  const Owner owner(p, stage);
  if (lane < 8 * kN * kLines && column < p.queries_of(owner.row) * p.group)
    fetch_ahead(query_of(p, owner, column) + lane % kLines * 128);
}

template <bool kLossy, int kDim, int kN, class P>
__device__ __forceinline__ void load_columns(const P& p, State<kDim, kN>& st, const Owner& owner, int block) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < kN; n++) {
    // Columns past the last repeat it; their results are not written.
    const char* from = query_of(p, owner, min((block * kN + n) * 8 + g, p.queries_of(owner.row) * p.group - 1));
#pragma unroll
    for (int s = 0; s < kDim / 16; s++)
#pragma unroll
      for (int part = 0; part < 2; part++)
        st.q[n][s][part] = *reinterpret_cast<const unsigned*>(
            from + 2 * (kLossy ? 16 * s + 2 * t + 8 * part : plain_dim<kDim>(s, part)));
  }
}

// Loads the queries of a bucket unchanged, early enough for begin_bucket.
template <int kDim, int kN, class P>
__device__ __forceinline__ void load_query(const P& p, State<kDim, kN>& st, const Stage& stage, int block) {
  const Owner owner(p, stage);
  if (tier_of(stage.meta)) load_columns<true>(p, st, owner, block);
  else load_columns<false>(p, st, owner, block);
}

// Score of the centre per column, where decode itself needs it; otherwise combine.cu adds it to all scores of codes.
template <class In, int kDim, int kN>
__device__ __forceinline__ void score_centre(const Params& p, State<kDim, kN>& st, const Owner& owner) {
  const int t = threadIdx.x & 3, request = p.requests ? __ldg(p.requests + owner.row) : owner.row;
  const float* centre = p.centre + request * p.centre_request + owner.head * kDim;
#pragma unroll
  for (int n = 0; n < kN; n++) {
    float dot = 0.f;
#pragma unroll
    for (int s = 0; s < kDim / 16; s++)
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const float2 pair = pair_to_float<In>(st.q[n][s][part]);
        const float2 c = __ldg(reinterpret_cast<const float2*>(centre + 16 * s + 2 * t + 8 * part));
        dot += pair.x * c.x + pair.y * c.y;
      }
    to_columns(sum_over_t(dot) * p.scale_log2, st.centre[n]);
  }
}

// Two powers of two from their exponents, from -8 to 8 in the low bytes of both halves.
__device__ __forceinline__ unsigned powers_of(f16, unsigned x) { return ((x & 0x001f001fu) * 1024 + 0x3c003c00u) & 0x7c007c00u; }
__device__ __forceinline__ unsigned powers_of(bf16, unsigned x) { return (x * 128 + 0x3f803f80u) & 0x7f807f80u; }

// Multiplies the queries that load_query read by powers of two [D], which is exact. One loop for both orders of dims: code
// that mixed tiers do not share costs them more than its arithmetic.
template <class In, int kDim, int kN>
__device__ __forceinline__ void balance_exactly(State<kDim, kN>& st, const signed char* powers, bool lossy) {
  const int t = threadIdx.x & 3;
  const signed char* first_steps[2][2];  // in the first two steps; later ones have the same offsets in both orders
#pragma unroll
  for (int i = 0; i < 4; i++) first_steps[i / 2][i % 2] = powers + (lossy ? 16 * (i / 2) + 2 * t + 8 * (i % 2) : 2 * i + 8 * t);
#pragma unroll
  for (int s = 0; s < kDim / 16; s++)
#pragma unroll
    for (int part = 0; part < 2; part++) {
      const signed char* from = first_steps[s % 2][part] + 16 * (s & ~1);
      if (kDim % 32 && s == kDim / 16 - 1 && !lossy) from = powers + plain_dim<kDim>(s, part);
      const unsigned both = __ldg(reinterpret_cast<const unsigned short*>(from));
      const unsigned by = powers_of(In{}, (both & 0xff) | (both & 0xff00) << 8);
#pragma unroll
      for (int n = 0; n < kN; n++) st.q[n][s][part] = multiply_pair(In{}, st.q[n][s][part], by);
    }
}

// Multiplies the queries with the balance of their KV head [D], rounded to In.
template <class In, int kDim, int kN>
__device__ __forceinline__ void balance_query(State<kDim, kN>& st, const float* balance) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int s = 0; s < kDim / 16; s++)
#pragma unroll
    for (int part = 0; part < 2; part++) {
      const float2 by = __ldg(reinterpret_cast<const float2*>(balance + 16 * s + 2 * t + 8 * part));
#pragma unroll
      for (int n = 0; n < kN; n++) {
        const float2 pair = pair_to_float<In>(st.q[n][s][part]);
        st.q[n][s][part] = pair_of(In{}, pair.x * by.x, pair.y * by.y);
      }
    }
}

// Converts the queries that load_query read to operands. kObserve: kMass, and importance changes in the pages.
template <class In, bool kMass, bool kObserve, bool kOrdered, int kDim, int kN, class P>
__device__ __forceinline__ void begin_bucket(const P& p, State<kDim, kN>& st, const Stage& stage, int block) {
  constexpr int kSteps = kDim / 16;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const Owner owner(p, stage);
  const int queries = p.queries_of(owner.row), columns = queries * p.group;
  if (P::kRagged || kOrdered) st.queries = queries;
  st.shift = 0;
  st.exponent = 24;
#pragma unroll
  for (int n = 0; n < kN; n++) {
#pragma unroll
    for (int s = 0; s < kSteps; s++) st.out[n][s][0] = st.out[n][s][1] = st.out[n][s][2] = st.out[n][s][3] = 0.f;
    st.l[n][0] = st.l[n][1] = 0.f;
#pragma unroll
    for (int c = 0; c < 2; c++)  // columns past the last count as begun
      st.m[n][c] = (block * kN + n) * 8 + 2 * t + c < columns ? kNotBegun : 0.f;
    st.centre[n][0] = st.centre[n][1] = st.middle[n][0] = st.middle[n][1] = 0.f;
    if constexpr (kMass)  // columns past the last, and those that see nothing, have weight 0
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int column = (block * kN + n) * 8 + 2 * t + c, query = divide(column, p.by_group);
        float lse = -kNone;
        if (column < columns)
          lse = __ldg(p.lse + (static_cast<i64>(owner.row) * p.queries + query) * (p.kv_heads * p.group) +
                      owner.head * p.group + column - query * p.group);
        st.m[n][c] = lse > kNone ? lse * 1.4426950408889634f : -kNone;
      }
  }
  if constexpr (kObserve) {
    st.weight = p.weights[owner.row];
    st.gain = 1.f - exp2f(st.weight * p.log2_decay);
  }
  if (kOrdered)
    st.first = __ldg(p.lengths + (p.requests ? __ldg(p.requests + owner.row) : owner.row) * p.length_stride) - queries;
  st.score = p.scale_log2;
  const bool lossy = tier_of(stage.meta) != 0;
  if constexpr (P::kBalance == kFactors) {
    if (!lossy) return;
    if (p.balance) balance_query<In>(st, p.balance + owner.head * kDim);
    if (p.softcap_log2 > 0.f && p.centre) score_centre<In>(p, st, owner);
  } else {
    if (lossy && (kMass || p.softcap_log2 > 0.f)) score_centre<In>(p, st, owner);  // centre of K, added here
    if constexpr (P::kBalance == kPowers) {
      const int request = p.requests ? __ldg(p.requests + owner.row) : owner.row;
      balance_exactly<In>(st, p.balance + request * p.centre_request + owner.head * kDim, lossy);
    }
    if (!lossy) return;
  }

  // Rotate 16 dims by a product with a matrix of +-1, the rest by butterflies over steps.
  unsigned h[2][2];
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int part = 0; part < 2; part++) {
      const int in = 2 * t + 8 * part, to = 8 * n + g;
      h[n][part] = pair_of(In{}, __popc(in & to) & 1 ? -1.f : 1.f, __popc((in + 1) & to) & 1 ? -1.f : 1.f);
    }
  float tops[4] = {0.f, 0.f, 0.f, 0.f};  // independent dependency chains
#pragma unroll
  for (int n = 0; n < kN; n++) {
    auto& x = st.out[n];  // not in use yet
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const unsigned a[4] = {st.q[n][s][0], 0u, st.q[n][s][1], 0u};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float c[4] = {0.f, 0.f, 0.f, 0.f};
        mma_16x8x16(In{}, c, a, h[half][0], h[half][1]);
        x[s][2 * half] = c[0];
        x[s][2 * half + 1] = c[1];
      }
    }
    butterflies<kSteps, 4>([&](int s, int i) -> float& { return x[s][i]; });
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) tops[i] = fmaxf(tops[i], fabsf(x[s][i]));
  }
  float largest = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  if (__any_sync(~0u, largest > 1e38f)) {  // an infinite query must not scale its neighbours down
    largest = 0.f;
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int s = 0; s < kSteps; s++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (fabsf(st.out[n][s][i]) <= 1e38f) largest = fmaxf(largest, fabsf(st.out[n][s][i]));
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  // Scale the largest value to 2^14 .. 2^15 by a power of two, which loses no bit that fp16 would have kept.
  const int exponent = static_cast<int>(__float_as_uint(fmaxf(largest, 1e-30f)) >> 23) - 127;
  const int power = min(max(14 - exponent, -126), 126);
  const float longer = __uint_as_float(static_cast<unsigned>(127 + power) << 23);
  constexpr int kBlock = kSteps & -kSteps;
  constexpr float kFactor = kBlock == 1 ? 0.25f : kBlock == 2 ? 0.17677669529663687f : kBlock == 4 ? 0.125f
                          : kBlock == 8 ? 0.08838834764831845f : 0.0625f;
  st.score = p.scale_log2 * kFactor * __uint_as_float(static_cast<unsigned>(127 - power) << 23);
#pragma unroll
  for (int n = 0; n < kN; n++) {
    const unsigned ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    float sums[2][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
#pragma unroll
      for (int part = 0; part < 2; part++) {
        st.q[n][s][part] = pair_of(f16{}, st.out[n][s][2 * part] * longer, st.out[n][s][2 * part + 1] * longer);
        st.out[n][s][2 * part] = st.out[n][s][2 * part + 1] = 0.f;
      }
      mma_16x8x16(f16{}, sums[s % 2], ones, st.q[n][s][0], st.q[n][s][1]);
    }
    st.middle[n][0] = sums[0][0] + sums[1][0], st.middle[n][1] = sums[0][1] + sums[1][1];
  }
}

// Rescales the second half of q for K of another width; exact except below 2^-24 of the largest value.
template <int kDim, int kN>
__device__ __forceinline__ void shift_query(State<kDim, kN>& st, int shift) {
  if (st.shift == shift) return;
  const unsigned power = static_cast<unsigned>(st.shift - shift + 15) << 10;
  st.shift = shift;
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int s = 0; s < kDim / 16; s++)
      st.q[n][s][1] = multiply_pair(f16{}, st.q[n][s][1], power | power << 16);
}
