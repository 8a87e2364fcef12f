// The streaming softmax of a warp: scores to weights that fit the second product, or to the mass of every token.
//
// Scores are in powers of two. The reference m of a column is such that weight * (scale of V) fits fp16; it is not the
// largest score, and changes only when a stage does not fit (`rebase`): one vote a stage instead of a reduction.
#pragma once
#include "decode_state.cuh"
#include "warp.cuh"

// Scores of a stage, already less m: x[tile][column block][row (token g, g + 8)][column]. Scales of V beside them.
template <int kTiles, int kN>
struct Scores {
  float x[kTiles][kN][2][2];
  float v[kTiles][2];
};

__device__ __forceinline__ int position_of(const Params& p, const unsigned char* positions, int first, int token) {
  if (p.position_bytes == 2) return reinterpret_cast<const unsigned short*>(positions)[token];
  if (p.position_bytes == 4) return reinterpret_cast<const int*>(positions)[token];
  return first + token;
}

// Whether some query does not see some token, by positions. Few stages have such tokens, and to ask costs little.
template <int kTiles, int kDim, int kN>
__device__ __forceinline__ bool hides(const Params& p, const State<kDim, kN>& st, const unsigned char* positions, int first) {
  bool some = false;
#pragma unroll
  for (int i = 0; i < kTiles; i += 2) {
    const int token = min(i * 16 + static_cast<int>(threadIdx.x & 31), kTiles * 16 - 1);
    const int position = position_of(p, positions, first, token);
    some = some || position > st.first || (p.window && position <= st.first + p.queries - 1 - p.window);
  }
  return __any_sync(~0u, some);
}

// Softcap, and what may not be seen: past the count, after the query, before its window.
template <int kTiles, bool kOrdered, int kDim, int kN>
__device__ __forceinline__ void mask(const Params& p, const State<kDim, kN>& st, Scores<kTiles, kN>& sc, int tokens,
                                  const unsigned char* positions, int first) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int last[kN][2];  // position that a column sees
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int c = 0; c < 2; c++)
      last[n][c] = kOrdered ? st.first + divide((blockIdx.y * kN + n) * 8 + 2 * t + c, p.by_group) : 0;
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = i * 16 + g + 8 * r;
      const bool there = token < tokens;
      const int position = kOrdered ? position_of(p, positions, first, token) : 0;
      if (!there) sc.v[i][r] = 0.f;
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float& x = sc.x[i][n][r][c];
          if (p.softcap_log2 > 0.f) {
            const float y = __fdividef(x + st.m[n][c], p.softcap_log2);
            const float e = exp2_of(2.885390081777927f * fabsf(y));
            x = p.softcap_log2 * copysignf(1.f - __fdividef(2.f, e + 1.f), y) - st.m[n][c];
          }
          bool seen = there;
          if (kOrdered) {
            seen = seen && position <= last[n][c];
            if (p.window) seen = seen && position > last[n][c] - p.window;
          }
          if (!seen) x = kNone;
        }
    }
}

// A new reference for every column, from the stage at hand; what was summed up moves along.
template <int kTiles, int kDim, int kN>
__device__ __forceinline__ void rebase(State<kDim, kN>& st, Scores<kTiles, kN>& sc) {
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float d = kNone;
#pragma unroll
      for (int i = 0; i < kTiles; i++)
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (sc.x[i][n][r][c] > kNone) d = fmaxf(d, sc.x[i][n][r][c] + log2_of(fmaxf(sc.v[i][r], 5.9604645e-8f)));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) d = fmaxf(d, __shfl_xor_sync(~0u, d, lanes));
      if (d <= kNone) d = 0.f;        // nothing is seen
      if (!st.fresh) d = fmaxf(d, 0.f);
      st.m[n][c] += d;
      const float shrink = exp2_of(-d);
      if (!st.fresh) {
        st.l[n][c] *= shrink;
#pragma unroll
        for (int s = 0; s < kDim / 16; s++) {
          st.out[n][s][c] *= shrink;
          st.out[n][s][2 + c] *= shrink;
        }
        st.weights[n][c] *= shrink;
      }
#pragma unroll
      for (int i = 0; i < kTiles; i++)
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (sc.x[i][n][r][c] > kNone) sc.x[i][n][r][c] -= d;
    }
  st.fresh = false;
}

// Scores to weights for the second product, in W; true if all of them fit.
template <class W, int kTiles, int kDim, int kN>
__device__ __forceinline__ bool weigh(const State<kDim, kN>& st, const Scores<kTiles, kN>& sc,
                                      unsigned (&w)[kTiles][kN][2], float (&l)[kN][2]) {
  unsigned most = 0u;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < kN; n++) l[n][0] = l[n][1] = 0.f;
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float a = exp2_of(sc.x[i][n][r][0]), b = exp2_of(sc.x[i][n][r][1]);
        l[n][0] += a;
        l[n][1] += b;
        w[i][n][r] = pair_of(W{}, a * sc.v[i][r], b * sc.v[i][r]);
        most = max_pair(W{}, most, w[i][n][r]);
      }
#pragma unroll
  for (int n = 0; n < kN; n++) sum = fmaxf(sum, fmaxf(l[n][0], l[n][1]));
  const float2 top = pair_to_float<W>(most);
  const bool fits = fmaxf(top.x, top.y) < 16384.f && sum < 1e18f;
  return !__any_sync(~0u, !fits || st.fresh);
}

template <class W, int kTiles, bool kOrdered, int kDim, int kN>
__device__ __forceinline__ void soften(const Params& p, State<kDim, kN>& st, Scores<kTiles, kN>& sc, int tokens,
                                       const unsigned char* positions, int first, unsigned (&w)[kTiles][kN][2]) {
  if (tokens < kTiles * 16 || p.softcap_log2 > 0.f || (kOrdered && hides<kTiles>(p, st, positions, first)))
    mask<kTiles, kOrdered>(p, st, sc, tokens, positions, first);
  float l[kN][2];
  if (!weigh<W>(st, sc, w, l)) {
    rebase<kTiles>(st, sc);
    weigh<W>(st, sc, w, l);
  }
#pragma unroll
  for (int n = 0; n < kN; n++) {
    st.l[n][0] += l[n][0];
    st.l[n][1] += l[n][1];
  }
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) w[i][n][r] = transpose8x8(w[i][n][r]);
}

// The weight of every token, all columns together, to its position.
template <int kTiles, int kDim, int kN>
__device__ __forceinline__ void share_mass(const Params& p, const State<kDim, kN>& st, Scores<kTiles, kN>& sc, int group,
                                           int tokens, const unsigned char* positions, int first) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
  mask<kTiles, true>(p, st, sc, tokens, positions, first);
  float* mass = p.partial_out + static_cast<i64>(group % p.units) * p.mass_length;
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kN; n++) sum += exp2_of(sc.x[i][n][r][0]) + exp2_of(sc.x[i][n][r][1]);
      sum = sum_over_t(sum);
      const int token = i * 16 + g + 8 * r;
      if ((lane & 3) || token >= tokens) continue;
      const int position = position_of(p, positions, first, token);
      if (position < p.mass_length) atomicAdd(mass + position, sum);
    }
}
