// A stage of plain rows. The order of dims does not matter to the products, so each lane loads contiguous ones.
#pragma once
#include "decode_softmax.cuh"
#include "ring.cuh"

// Dims of the plain second product: row `upper` (0: g, 1: g + 8) of its k-th result. Per 64 dims a lane has 8 in a row,
// per 32 left four, per 16 left two.
template <int kDim>
__device__ __forceinline__ int plain_out_dim(int k, int upper) {
  const int g = (threadIdx.x & 31) >> 2, block = k / 4 * 64, left = kDim - block, i = k % 4;
  if (left >= 64) return block + 8 * g + 4 * upper + i;
  if (left >= 32 && i < 2) return block + 4 * g + 2 * upper + i;
  return kDim - 16 + 2 * g + upper;
}

// Elements `e` of two tokens' words as one register.
__device__ __forceinline__ unsigned pair_tokens(const unsigned* a, const unsigned* b, int e) {
  return __byte_perm(a[e / 2], b[e / 2], e % 2 ? 0x7632 : 0x5410);
}

template <int kWords>
__device__ __forceinline__ void load_words(const unsigned char* from, unsigned* words) {
  if constexpr (kWords == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else if constexpr (kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    words[0] = x.x, words[1] = x.y;
  } else {
    words[0] = *reinterpret_cast<const unsigned*>(from);
  }
}

// kProducts products whose rows are dims `base` on, 2 * kProducts of them in a row for each lane.
template <class In, int kProducts, int kDim, int kN>
__device__ __forceinline__ void attend_values(State<kDim, kN>& st, const unsigned char* rows, int k, int base,
                                              const unsigned (&w)[kN][2]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  unsigned x[4][kProducts];  // tokens 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
  for (int j = 0; j < 4; j++)
    load_words<kProducts>(rows + ((2 * t + j % 2 + j / 2 * 8) * kDim + base + 2 * kProducts * g) * 2, x[j]);
#pragma unroll
  for (int i = 0; i < kProducts; i++) {
    const unsigned a[4] = {pair_tokens(x[0], x[1], i), pair_tokens(x[0], x[1], i + kProducts),
                           pair_tokens(x[2], x[3], i), pair_tokens(x[2], x[3], i + kProducts)};
#pragma unroll
    for (int n = 0; n < kN; n++) mma_16x8x16(In{}, st.out[n][k + i], a, w[n][0], w[n][1]);
  }
}

// A stage of plain rows.
template <class In, class P, bool kMass, bool kObserve, int kDim, int kN>
__device__ __forceinline__ void attend_rows(const Params& p, State<kDim, kN>& st, unsigned char* stage, int tokens, int bucket,
                                            int first) {
  constexpr int kSteps = kDim / 16, kTiles = P::kMine;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const View view = view_of<kTiles, P::kOrdered>(p, st, tokens, stage + P::kBytes, first);
  if (view == kNothing && !(kObserve && p.ema)) return;
  float old[kTiles][2];
  if constexpr (kObserve) load_importance<kTiles>(p, st, 0, tokens, old);
  unsigned char* v_rows = stage + P::kKBytes;
  if (!kMass && tokens < P::kTokens) {  // empty slots may hold NaN, which weight 0 would not cancel
    for (int i = tokens * kDim * 2 + lane * 16; i < P::kVBytes; i += 512)
      *reinterpret_cast<uint4*>(v_rows + i) = make_uint4(0, 0, 0, 0);
    Ring<1>::fence();
    __syncwarp();
  }
  Scores<kTiles, kN> sc;
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    float s[kN][4];
#pragma unroll
    for (int n = 0; n < kN; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
    const unsigned char* rows = stage + (i * 16 + g) * kDim * 2;
#pragma unroll
    for (int k = 0; k + 1 < kSteps; k += 2) {
      unsigned a[4], b[4];
      load_words<4>(rows + (16 * k + 8 * t) * 2, a);
      load_words<4>(rows + (8 * kDim + 16 * k + 8 * t) * 2, b);
      const unsigned one[4] = {a[0], b[0], a[1], b[1]}, two[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
      for (int n = 0; n < kN; n++) {
        mma_16x8x16(In{}, s[n], one, st.q[n][k][0], st.q[n][k][1]);
        mma_16x8x16(In{}, s[n], two, st.q[n][k + 1][0], st.q[n][k + 1][1]);
      }
    }
    if constexpr (kSteps % 2) {
      unsigned a[2], b[2];
      load_words<2>(rows + (16 * (kSteps - 1) + 4 * t) * 2, a);
      load_words<2>(rows + (8 * kDim + 16 * (kSteps - 1) + 4 * t) * 2, b);
      const unsigned one[4] = {a[0], b[0], a[1], b[1]};
#pragma unroll
      for (int n = 0; n < kN; n++) mma_16x8x16(In{}, s[n], one, st.q[n][kSteps - 1][0], st.q[n][kSteps - 1][1]);
    }
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        sc.x[i][n][0][c] = fmaf(s[n][c], st.score, -st.m[n][c]);
        sc.x[i][n][1][c] = fmaf(s[n][2 + c], st.score, -st.m[n][c]);
      }
    sc.v[i][0] = sc.v[i][1] = 1.f;
  }
  if constexpr (kMass) {
    share_mass<kTiles, kObserve>(p, st, sc, view, bucket, 0, tokens, stage + P::kBytes, first, old);
    return;
  }
  unsigned w[kTiles][kN][2];
  soften<In, kTiles, P::kOrdered>(p, st, sc, view, tokens, stage + P::kBytes, first, w);
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    const unsigned char* rows = v_rows + i * 16 * kDim * 2;
#pragma unroll
    for (int k = 0; k + 4 <= kSteps; k += 4) attend_values<In, 4>(st, rows, k, 16 * k, w[i]);
    constexpr int kDone = kSteps / 4 * 4;
    if constexpr (kSteps % 4 >= 2) attend_values<In, 2>(st, rows, kDone, 16 * kDone, w[i]);
    if constexpr (kSteps % 2) attend_values<In, 1>(st, rows, kSteps - 1, 16 * (kSteps - 1), w[i]);
  }
}
