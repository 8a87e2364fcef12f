// Online softmax of a warp: scores to weights that fit the second product, or to the mass of every token.
//
// Scores are in log2 units. The reference m of a column is such that weight * (scale of V) fits fp16; it is not the
// largest score, and changes only when a stage does not fit (`rebase`): one vote per stage instead of a reduction. A column
// begins with the first stage in which it sees a token: a reference taken from a hidden stage could be far above all later
// scores, whose weights would then underflow.
#pragma once
#include "decode_state.cuh"
#include "warp.cuh"

// Scores of a stage, m already subtracted: x[tile][column block][row (token g, g + 8)][column]. And the scales of V.
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

// Visibility of a stage: no token, some, or all tokens to every query. Decided before the first product. The first `skip`
// tokens are hidden from all.
enum View { kNothing, kPart, kWhole };
template <int kTiles, bool kOrdered, int kDim, int kN>
__device__ __forceinline__ View view_of(const Params& p, const State<kDim, kN>& st, int tokens, const unsigned char* positions,
                                        int first, int skip = 0) {
  if (skip >= kTiles * 16) return kNothing;
  if (!kOrdered) return tokens < kTiles * 16 || skip > 0 ? kPart : kWhole;
  bool hidden = tokens < kTiles * 16 || skip > 0, seen = false;
  const int last = st.first + st.queries - 1;  // position of the last query
#pragma unroll
  for (int i = 0; i < kTiles; i += 2) {
    const int token = min(i * 16 + static_cast<int>(threadIdx.x & 31), min(tokens, kTiles * 16) - 1);
    const int position = position_of(p, positions, first, token);
    hidden = hidden || position > st.first || (p.window && position <= last - p.window);
    seen = seen || (position <= last && (!p.window || position > st.first - p.window));
  }
  if (!__any_sync(~0u, seen)) return kNothing;
  return __any_sync(~0u, hidden) ? kPart : kWhole;
}

// Applies the softcap and masks tokens past the count, after the query and before its window.
template <int kTiles, bool kOrdered, int kDim, int kN>
__device__ __forceinline__ void mask(const Params& p, const State<kDim, kN>& st, Scores<kTiles, kN>& sc, int tokens,
                                  const unsigned char* positions, int first, int skip = 0) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  int last[kN][2];  // last position that a column sees
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int c = 0; c < 2; c++)
      last[n][c] = kOrdered ? st.first + divide(((p.first_block + blockIdx.y) * kN + n) * 8 + 2 * t + c, p.by_group) : 0;
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = i * 16 + g + 8 * r;
      const bool there = token < tokens && token >= skip;
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

// Takes a new reference for every column that sees this stage, and rescales its sums.
template <int kTiles, bool kOrdered, int kDim, int kN>
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
      const bool begun = has_begun(st.m[n][c]);
      if (d <= kNone) {  // no visible token, or only NaN
        if (kOrdered) continue;
        d = 0.f;
      }
      if (begun) {
        d = fmaxf(d, 0.f);
        const float shrink = exp2_of(-d);
        st.l[n][c] *= shrink;
#pragma unroll
        for (int s = 0; s < kDim / 16; s++) {
          st.out[n][s][c] *= shrink;
          st.out[n][s][2 + c] *= shrink;
        }
        st.weights[n][c] *= shrink;
      }
      st.m[n][c] += d;
#pragma unroll
      for (int i = 0; i < kTiles; i++)
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (sc.x[i][n][r][c] > kNone) sc.x[i][n][r][c] -= d;
    }
}

// Converts scores to weights for the second product, in W; true if all of them fit.
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
  bool fits = fmaxf(top.x, top.y) < 16384.f && sum < 1e18f;
#pragma unroll
  for (int n = 0; n < kN; n++) fits = fits && has_begun(st.m[n][0]) && has_begun(st.m[n][1]);
  return !__any_sync(~0u, !fits);
}

// Converts scores to weights as operands of the second product.
template <class W, int kTiles, bool kOrdered, int kDim, int kN>
__device__ __forceinline__ void soften(const Params& p, State<kDim, kN>& st, Scores<kTiles, kN>& sc, View view, int tokens,
                                       const unsigned char* positions, int first, unsigned (&w)[kTiles][kN][2],
                                       int skip = 0) {
  if (view != kWhole || p.softcap_log2 > 0.f) mask<kTiles, kOrdered>(p, st, sc, tokens, positions, first, skip);
  float l[kN][2];
  if (!weigh<W>(st, sc, w, l)) {
    rebase<kTiles, kOrdered>(st, sc);
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

// Importance of a stage's tokens, loaded before its products: old[tile][row (token g, g + 8)].
template <int kTiles, int kDim, int kN>
__device__ __forceinline__ void load_importance(const Params& p, const State<kDim, kN>& st, int before, int tokens,
                                                float (&old)[kTiles][2]) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = i * 16 + g + 8 * r;
      old[i][r] = !(lane & 3) && token < tokens ? st.importance[before + token] : 0.f;
    }
}

// Importance after a step in which a token that `seen` queries could have seen got `mass` (observe.py).
template <int kDim, int kN>
__device__ __forceinline__ float observed(const Params& p, const State<kDim, kN>& st, float old, float mass, int seen) {
  mass = mass < 3e38f ? mass * __fdividef(min(st.weight, seen), min(p.queries, seen)) : 0.f;  // NaN and infinity count as 0
  if (!p.ema) return fminf(old + mass, 3.4028234e38f);
  return old + (__fdividef(mass, st.weight) - (p.first_block ? 0.f : old)) * st.gain;
}

// Adds the weight of every token, summed over columns, at its position or (kObserve) to its importance.
template <int kTiles, bool kObserve, int kDim, int kN>
__device__ __forceinline__ void share_mass(const Params& p, const State<kDim, kN>& st, Scores<kTiles, kN>& sc, View view,
                                           int bucket, int before, int tokens, const unsigned char* positions, int first,
                                           const float (&old)[kTiles][2]) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
  if (view != kWhole || p.softcap_log2 > 0.f) mask<kTiles, true>(p, st, sc, tokens, positions, first);
  float* mass = p.partial_out + static_cast<i64>(bucket % p.head_caches) * p.mass_length;
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
      if constexpr (kObserve)
        st.importance[before + token] = observed(p, st, old[i][r], sum, st.first + p.queries - position);
      else if (position < p.mass_length)
        atomicAdd(mass + position, sum);
    }
}
