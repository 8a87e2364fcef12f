// A stage of codes: both products straight from the words of a page.
#pragma once
#include "decode_query.cuh"
#include "decode_softmax.cuh"
#include "operands.cuh"

// Changes the power of two of rows g + 8, for V of another width.
template <int kDim, int kN>
__device__ __forceinline__ void change_exponent(State<kDim, kN>& st, int exponent) {
  if (st.exponent == exponent) return;
  const float power = __uint_as_float(static_cast<unsigned>(st.exponent - exponent + 127) << 23);
  st.exponent = exponent;
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int s = 0; s < kDim / 16; s++) {
      st.out[n][s][2] *= power;
      st.out[n][s][3] *= power;
    }
}

// A stage of codes, kSpan tiles at a time: enough work for the tensor cores, and small code. `position`: of its first token,
// if positions are consecutive.
template <class T, class P, bool kMass, bool kObserve, int kDim, int kN>
__device__ __forceinline__ void attend_codes(const Params& p, State<kDim, kN>& st, const unsigned char* stage, int tokens,
                                             int bucket, int position = 0) {
  constexpr int kSteps = kDim / 16, kMost = kDim <= 64 || (T::kK <= 3 && T::kV <= 3) ? 4 : 2, kSpan = P::kMine < kMost ? P::kMine : kMost;
  using KWords = Words<T::kK, kSteps, P::kMine, kSpan>;
  using VWords = Words<T::kV, kSteps, P::kMine, kSpan>;
  const int g = (threadIdx.x & 31) >> 2;
  const unsigned char *v_codes = stage + P::kKBytes, *scales = v_codes + P::kVBytes;
  shift_query(st, kQueryShift<T::kK>);
  change_exponent(st, place<T::kV>(1));
  constexpr float kUnit0 = 16777216.f, kUnit1 = place<T::kK>(1) == 24   ? 16777216.f
                                                : place<T::kK>(1) == 22 ? 4194304.f
                                                                        : 1048576.f;  // 2^place of rows g and g + 8
#pragma unroll
  for (int n = 0; n < kN; n++) st.weights[n][0] = st.weights[n][1] = st.weights[n][2] = st.weights[n][3] = 0.f;
  const auto attend_span = [&](int span) {
    const int before = span * kSpan * 16, first = P::kConsecutive ? position + before : 0;
    const unsigned char* positions = stage + P::kBytes + before * p.position_bytes;
    const int skip = P::kSkips ? st.skip - first : 0;
    const View view = view_of<kSpan, P::kOrdered>(p, st, tokens - before, positions, first, skip);
    if (view == kNothing && !(kObserve && p.ema)) return;
    float old[kSpan][2];
    if constexpr (kObserve) load_importance<kSpan>(p, st, before, tokens - before, old);
    Scores<kSpan, kN> sc;
    KWords words;
    words.load_span(stage, span);
    float s[kSpan][kN][4];
#pragma unroll
    for (int i = 0; i < kSpan; i++)
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) s[i][n][c] = st.middle[n][c & 1] * (-middle<T::kK>() / (c < 2 ? kUnit0 : kUnit1));
#pragma unroll
    for (int k = 0; k < kSteps; k++)
#pragma unroll
      for (int i = 0; i < kSpan; i++) {
        unsigned a[4];
        words.codes(span, i, k, a);
#pragma unroll
        for (int n = 0; n < kN; n++) mma_16x8x16(f16{}, s[i][n], a, st.q[n][k][0], st.q[n][k][1]);
      }
#pragma unroll
    for (int i = 0; i < kSpan; i++) {
      const uint2 scale = *reinterpret_cast<const uint2*>(scales + scale_row(span * kSpan + i, g));
      const float2 ks = halves_of(scale.x), vs = halves_of(scale.y);
      const float k0 = ks.x * (st.score * kUnit0), k1 = ks.y * (st.score * kUnit1);
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const float bias = st.centre[n][c] - st.m[n][c];
          sc.x[i][n][0][c] = fmaf(s[i][n][c], k0, bias);
          sc.x[i][n][1][c] = fmaf(s[i][n][2 + c], k1, bias);
        }
      sc.v[i][0] = vs.x;
      sc.v[i][1] = vs.y * kSecondHalf<T::kV>;
    }
    unsigned w[kSpan][kN][2];
    if constexpr (kMass) {
      share_mass<kSpan, kObserve>(p, st, sc, view, bucket, before, tokens - before, positions, first, old);
      return;
    }
    soften<f16, kSpan, P::kOrdered>(p, st, sc, view, tokens - before, positions, first, w, skip);

    constexpr unsigned kOnes = 0x00010001u, kOnes8 = kOnes << (24 - place<T::kV>(2));
    const unsigned ones[4] = {kOnes, kOnes, kOnes8, kOnes8};
    VWords values;
    values.load_span(v_codes, span);
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < kSpan; i++) mma_16x8x16(f16{}, st.weights[n], ones, w[i][n][0], w[i][n][1]);
#pragma unroll
    for (int i = 0; i < kSpan; i++)
#pragma unroll
      for (int k = 0; k < kSteps; k++) {
        unsigned a[4];
        values.codes(span, i, k, a);
#pragma unroll
        for (int n = 0; n < kN; n++) mma_16x8x16(f16{}, st.out[n][k], a, w[i][n][0], w[i][n][1]);
      }
  };
  const int spans = (tokens + kSpan * 16 - 1) / (kSpan * 16);
  if constexpr (KWords::kRegular && VWords::kRegular) {
#pragma unroll 1
    for (int span = 0; span < spans; span++) attend_span(span);
  } else {
#pragma unroll
    for (int span = 0; span < P::kMine / kSpan; span++)
      if (span < spans) attend_span(span);
  }
  if constexpr (kMass) return;
  // Subtract the middle level times the sum of weights after each stage, so that the sums stay small.
  constexpr float kLess0 = -middle<T::kV>(), kLess1 = kLess0 * (1 << (24 - place<T::kV>(1)));
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int k = 0; k < kSteps; k++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        st.out[n][k][c] = fmaf(kLess0, st.weights[n][c], st.out[n][k][c]);
        st.out[n][k][2 + c] = fmaf(kLess1, st.weights[n][c], st.out[n][k][2 + c]);
      }
}
