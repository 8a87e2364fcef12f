// End of an item: the partials of the KV warps are combined, and the output is written in 16-byte pieces.
#pragma once
#include "mma.cuh"
#include "prefill_softmax.cuh"

// Adds the partials of KV warps 1 .. to the state of KV warp 0; returns false in the others, which are done.
template <class T>
__device__ __forceinline__ bool add_kv_warps(State<T>& st, unsigned char* shared, int row_warp, int kv_warp, float to_log2,
                                           int lane) {
  const int g = lane >> 2, t = lane & 3;
  constexpr int kAll = T::kRowTiles * T::kDimTiles;
  const auto out_of = [&](int from) {
    return reinterpret_cast<float4*>(shared + T::kQueryBytes + from * T::kRingBytes) + row_warp * kAll * 32 + lane;
  };
  const auto stats_of = [&](int from, int r, int half) {
    const int row = row_warp * T::kRows + r * 16 + half * 8 + g;
    return reinterpret_cast<float2*>(shared + T::kStatsAt) + (from - 1) * T::kM + row;
  };
  if (kv_warp) {
#pragma unroll
    for (int i = 0; i < kAll; i++) {
      const float* x = st.out[i / T::kDimTiles][i % T::kDimTiles];
      out_of(kv_warp)[i * 32] = make_float4(x[0], x[1], x[2], x[3]);
    }
#pragma unroll
    for (int i = 0; i < T::kRowTiles * 2; i++)
      if (t == 0) *stats_of(kv_warp, i / 2, i % 2) = make_float2(st.m[i / 2][i % 2], st.l[i / 2][i % 2]);
  }
  __syncthreads();
  if (kv_warp) return false;
#pragma unroll
  for (int from = 1; from < T::kKvWarps; from++)
#pragma unroll
    for (int r = 0; r < T::kRowTiles; r++) {
      float own[2], other[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float2 x = *stats_of(from, r, half);
        const float m = fmaxf(st.m[r][half], x.x), base = m == -infinity() ? 0.f : m * to_log2;
        own[half] = exp2_of(st.m[r][half] * to_log2 - base);
        other[half] = exp2_of(x.x * to_log2 - base);
        st.m[r][half] = m;
        st.l[r][half] = st.l[r][half] * own[half] + x.y * other[half];
      }
#pragma unroll
      for (int d = 0; d < T::kDimTiles; d++) {
        const float4 x = out_of(from)[(r * T::kDimTiles + d) * 32];
        const float parts[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) st.out[r][d][i] = st.out[r][d][i] * own[i / 2] + parts[i] * other[i / 2];
      }
    }
  return true;
}

template <class In, class T>
__device__ __forceinline__ void finish(const Params& p, State<T>& st, unsigned char* shared, float to_log2) {
  const int me = opaque(threadIdx.x), lane = me & 31, warp = __shfl_sync(~0u, me >> 5, 0);
  const int kv_warp = warp / T::kRowWarps, row_warp = warp % T::kRowWarps;
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < T::kRowTiles * 2; i++) {
    float& l = st.l[i / 2][i % 2];
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
  }
  if constexpr (T::kKvWarps > 1)
    if (!add_kv_warps<T>(st, shared, row_warp, kv_warp, to_log2, lane)) return;

  const Item item = item_of<T>(p, opaque(blockIdx.x));  // recomputed, to save registers in the main loop
  unsigned char* rows = shared + row_warp * T::kRows * T::Layout::kBytes;  // memory of the warp's queries
  const int first_row = row_warp * T::kRows, token = item.q_start + item.row + first_row;
  char* const out = const_cast<char*>(at(p.out, p.out_by, item.batch, item.head, token));
  char* const lse = const_cast<char*>(at(p.lse, p.lse_by, item.batch, item.head, token));
#pragma unroll
  for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = r * 16 + half * 8 + g;
      float l = st.l[r][half], base = st.m[r][half] * to_log2, factor = 1.f;
      if (p.sinks) {
        const float sink = p.sinks[item.head] * kLog2e, top = fmaxf(fmaxf(sink, base), -1e38f);  // both may be -inf
        factor = exp2_of(base - top);
        l = l * factor + exp2_of(sink - top);
        base = top;
      }
      factor = l == 0.f ? 0.f : __fdividef(factor, l);
      if (p.lse && t == 0 && first_row + row < item.rows)
        *reinterpret_cast<float*>(lse + row * static_cast<i64>(p.lse_by.token)) =
            l == 0.f ? -infinity() : (base + log2_of(l)) * kLn2;
#pragma unroll
      for (int d = 0; d < T::kDimTiles; d++) {
        const unsigned pair = pair_of(In{}, st.out[r][d][half * 2] * factor, st.out[r][d][half * 2 + 1] * factor);
        *reinterpret_cast<unsigned*>(rows + T::Layout::offset(row, d) + t * 4) = pair;
      }
    }
  __syncwarp();
  constexpr int kChunks = T::Layout::kChunks;
#pragma unroll
  for (int i = lane; i < T::kRows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (first_row + row < item.rows)
      *reinterpret_cast<uint4*>(out + row * static_cast<i64>(p.out_by.token) + chunk * 16) =
          *reinterpret_cast<const uint4*>(rows + T::Layout::offset(row, chunk));
  }
}
