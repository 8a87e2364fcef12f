// Online softmax of a warp's queries, in registers: converts the scores of a tile to weights and rescales the sums.
//
// A lane has rows g and g + 8 of a row tile, and keys 2t, 2t + 1 of every eight. The reference m is a score as the
// product leaves it; times `to_log2` it is in log2 units.
#pragma once
#include "prefill_tile.cuh"
#include "warp.cuh"

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

template <class T>
struct State {
  float out[T::kRowTiles][T::kDimTiles][4];
  float m[T::kRowTiles][2], l[T::kRowTiles][2];  // reference; sum of this lane's weights
  __device__ __forceinline__ State() {
#pragma unroll
    for (int r = 0; r < T::kRowTiles; r++) {
#pragma unroll
      for (int i = 0; i < T::kDimTiles * 4; i++) out[r][i / 4][i % 4] = 0.f;
      m[r][0] = m[r][1] = -infinity();
      l[r][0] = l[r][1] = 0.f;
    }
  }
};

template <class T> using ScoresOf = float[T::kRowTiles][T::kKeyTiles][4];

template <bool kSoftcap>
__device__ __forceinline__ float log2_factor(const Params& p) {
  return kSoftcap ? 1.f : p.scale_log2;
}

// c * tanh(score / c), in log2 units.
template <class T>
__device__ __forceinline__ void cap(const Params& p, ScoresOf<T>& s) {
  const float inner = __fdividef(p.scale_log2, p.softcap_log2) * (2.f * kLog2e);
#pragma unroll
  for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
    for (int i = 0; i < T::kKeyTiles * 4; i++) {
      float& x = s[r][i / 4][i % 4];
      const float e = exp2_of(inner * fabsf(x));
      x = p.softcap_log2 * copysignf(1.f - __fdividef(2.f, e + 1.f), x);
    }
}

// Masks keys from `key` on for queries from position `place` on: past the end, after the query, before its window.
template <class T>
__device__ __forceinline__ void mask(const Params& p, int place, int end, int key, ScoresOf<T>& s, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int position = place + r * 16 + half * 8 + g, first = key + 2 * t;
      const int last = (p.causal ? min(position, end - 1) : end - 1) - first;
      const int least = p.window ? position - p.window + 1 - first : 0;
#pragma unroll
      for (int n = 0; n < T::kKeyTiles; n++)
#pragma unroll
        for (int c = 0; c < 2; c++)
          if (n * 8 + c > last || n * 8 + c < least) s[r][n][half * 2 + c] = -infinity();
    }
}

// Takes a new reference only if a score exceeds the old one by more than kSlack: weights are then at most 2^kSlack, which
// fp16 holds, and the sums are rarely rescaled. `base` is subtracted from scores in log2 units.
constexpr float kSlack = 8.f;

template <class T>
__device__ __forceinline__ void rebase(State<T>& st, const ScoresOf<T>& s, float to_log2, float (&base)[T::kRowTiles][2]) {
  float most[T::kRowTiles][2];
  bool grows = false;
#pragma unroll
  for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float m = -infinity();
#pragma unroll
      for (int n = 0; n < T::kKeyTiles; n++) m = fmaxf(m, fmaxf(s[r][n][half * 2], s[r][n][half * 2 + 1]));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 1));
      m = fmaxf(m, __shfl_xor_sync(~0u, m, 2));
      grows = grows || (m - st.m[r][half]) * to_log2 > kSlack;
      most[r][half] = m;
    }
  if (__any_sync(~0u, grows))
#pragma unroll
    for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float m = fmaxf(st.m[r][half], most[r][half]);
        const float shrink = m == -infinity() ? 0.f : exp2_of((st.m[r][half] - m) * to_log2);
        st.m[r][half] = m;
        st.l[r][half] *= shrink;
#pragma unroll
        for (int d = 0; d < T::kDimTiles; d++) {
          st.out[r][d][half * 2] *= shrink;
          st.out[r][d][half * 2 + 1] *= shrink;
        }
      }
#pragma unroll
  for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
    for (int half = 0; half < 2; half++) base[r][half] = st.m[r][half] == -infinity() ? 0.f : st.m[r][half] * to_log2;
}
