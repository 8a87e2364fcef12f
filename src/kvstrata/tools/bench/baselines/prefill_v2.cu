// The forward attention that the note on V3 starts from ("V2"), as a baseline, and correct: 24 KB of shared
// memory hold Q, K, V, the scores and the output accumulator; products by wmma; one block per (head, 32 queries);
// plain loads of 4 bytes.
//
//   Q [32 x 64], K [32 x 64], V [32 x 64], S [32 x 32] float32, later P in its place, O [32 x 64] float32
//
// q, k, v, out: [units, tokens, 64], contiguous; a unit is a head of a sequence. Causal is aligned to the last key.
#include "mma.cuh"
#include "warp.cuh"
#include "wmma.cuh"

constexpr int kM = 32, kN = 32, kDim = 64, kThreads = 128;
constexpr float kLowest = -1e30f;

struct Params {
  const unsigned short *q, *k, *v;
  unsigned short* out;
  int q_len, k_len, m_blocks, causal;
  float scale_log2;
};

__device__ __forceinline__ void load_rows(unsigned* to, const unsigned short* from, int rows) {
  for (int i = threadIdx.x; i < kM * kDim / 2; i += kThreads)
    to[i] = i / (kDim / 2) < rows ? reinterpret_cast<const unsigned*>(from)[i] : 0u;
}

template <class In>
__global__ void __launch_bounds__(kThreads) prefill_v2(const __grid_constant__ Params p) {
  __shared__ __align__(128) unsigned q_tile[kM * kDim / 2], k_tile[kN * kDim / 2], v_tile[kN * kDim / 2];
  __shared__ __align__(128) float scores[kM * kN], sums[kM * kDim];
  const int unit = blockIdx.x / p.m_blocks, first_row = blockIdx.x % p.m_blocks * kM, warp = threadIdx.x / 32;
  const long long q_at = (static_cast<long long>(unit) * p.q_len + first_row) * kDim;
  const long long k_at = static_cast<long long>(unit) * p.k_len * kDim;
  const int rows = min(kM, p.q_len - first_row), shift = p.k_len - p.q_len;
  const int end = p.causal ? min(p.k_len, first_row + rows + shift) : p.k_len;
  const int row = threadIdx.x / 4, part = threadIdx.x % 4;  // four threads per row: 8 scores and 16 dims each
  load_rows(q_tile, p.q + q_at, rows);
  for (int i = threadIdx.x; i < kM * kDim; i += kThreads) sums[i] = 0.f;
  float m = kLowest, l = 0.f;

  for (int key = 0; key < end; key += kN) {
    __syncthreads();
    load_rows(k_tile, p.k + k_at + static_cast<long long>(key) * kDim, min(kN, p.k_len - key));
    load_rows(v_tile, p.v + k_at + static_cast<long long>(key) * kDim, min(kN, p.k_len - key));
    __syncthreads();
    {
      const int i = warp / 2 * 16, j = warp % 2 * 16;
      Accumulator s = {};
      for (int d = 0; d < kDim; d += 16) {
        Operand a, b;
        load_a_row<In>(a, q_tile + (i * kDim + d) / 2, kDim);
        load_b_col<In>(b, k_tile + (j * kDim + d) / 2, kDim);
        multiply<In, true>(s, a, b);
      }
      store_sum(scores + i * kN + j, s, kN);
    }
    __syncthreads();

    float x[8], most = kLowest, sum = 0.f;
    for (int c = 0; c < 8; c++) {
      const int at = key + part * 8 + c;
      const bool seen = at < end && (!p.causal || at <= first_row + row + shift);
      x[c] = seen ? scores[row * kN + part * 8 + c] * p.scale_log2 : kLowest;
      most = fmaxf(most, x[c]);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    most = fmaxf(most, m);
    const float shrink = exp2_of(m - most);
    __syncthreads();  // the scores have been read: the weights take their place
    for (int c = 0; c < 8; c++) {
      x[c] = x[c] <= kLowest ? 0.f : exp2_of(x[c] - most);
      sum += x[c];
    }
    for (int c = 0; c < 8; c += 2)
      reinterpret_cast<unsigned*>(scores)[(row * kN + part * 8 + c) / 2] = pair_of(In{}, x[c], x[c + 1]);
    for (int d = 0; d < 16; d++) sums[row * kDim + part * 16 + d] *= shrink;
    m = most;
    l = l * shrink + sum;
    __syncthreads();

    for (int tile = warp; tile < kM / 16 * kDim / 16; tile += 4) {
      const int i = tile / (kDim / 16) * 16, j = tile % (kDim / 16) * 16;
      Accumulator o;
      load_sum(o, sums + i * kDim + j, kDim);
      for (int n = 0; n < kN; n += 16) {
        Operand a, b;
        load_a_row<In>(a, reinterpret_cast<unsigned*>(scores) + (i * kN + n) / 2, kN);
        load_b_row<In>(b, v_tile + (n * kDim + j) / 2, kDim);
        multiply<In, false>(o, a, b);
      }
      store_sum(sums + i * kDim + j, o, kDim);
    }
  }
  __syncthreads();
  l += __shfl_xor_sync(~0u, l, 1);
  l += __shfl_xor_sync(~0u, l, 2);
  if (row >= rows) return;
  for (int d = part * 16; d < part * 16 + 16; d += 2) {
    const float* at = sums + row * kDim + d;
    *reinterpret_cast<unsigned*>(p.out + q_at + row * kDim + d) =
        l == 0.f ? 0u : pair_of(In{}, at[0] / l, at[1] / l);
  }
}
