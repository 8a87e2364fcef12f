// The partial that a warp leaves for combine.cu.
#pragma once
#include "decode_rows.cuh"

// Writes the partial of a warp over its stages of a bucket: `sums` [columns] and `outs` [columns, D].
template <int kDim, int kN>
__device__ __forceinline__ void write_partial(State<kDim, kN>& st, int columns, bool lossy, float2* sums, float* outs) {
  constexpr int kSteps = kDim / 16;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (lossy) {
    const float high = __uint_as_float(static_cast<unsigned>(st.exponent + 127) << 23);
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int s = 0; s < kSteps; s++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          st.out[n][s][c] *= 16777216.f;
          st.out[n][s][2 + c] *= high;
        }
  }
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float l = st.l[n][c];
#pragma unroll
      for (int d = 4; d < 32; d *= 2) l += __shfl_xor_sync(~0u, l, d);
      const int column = n * 8 + 2 * t + c;
      if (column >= columns) continue;
      if (g == 0) sums[column] = make_float2(st.m[n][c], l);
      float* to = outs + column * kDim;
      if (lossy) {
        to += g;
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          to[16 * s] = st.out[n][s][c];
          to[16 * s + 8] = st.out[n][s][2 + c];
        }
      } else {
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          to[plain_out_dim<kDim>(s, 0)] = st.out[n][s][c];
          to[plain_out_dim<kDim>(s, 1)] = st.out[n][s][2 + c];
        }
      }
    }
}

template <int kDim, int kN, class P>
__device__ __forceinline__ void end_bucket(const P& p, State<kDim, kN>& st, int bucket, int chunk, int block) {
  const i64 first = (static_cast<i64>(chunk + bucket) * gridDim.y + block) * (8 * kN);
  const int queries = P::kRagged ? st.queries : p.queries;
  write_partial(st, queries * p.group - block * 8 * kN, bucket >= p.head_caches, p.partial_sum + first,
                p.partial_out + first * kDim);
}
