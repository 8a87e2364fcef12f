// The checking build: scores and weights through shared memory, compared with plain sums over the rows of Q, K and V.
//
// A warp's rows are kScoreRow bytes apart: scores in float32, then weights in In at the same place.
#pragma once
#include "fp8.cuh"
#include "prefill_softmax.cuh"

template <class In, class T>
__device__ __forceinline__ float element_of(const unsigned char* tile, int row, int d) {
  return to_float(In{*reinterpret_cast<const unsigned short*>(tile + T::Layout::offset(row, d / 8) + d % 8 * 2)});
}

__device__ __forceinline__ void count(unsigned* counters, float got, float wanted, float size) {
  atomicAdd(counters, 1u);
  if (!(fabsf(got - wanted) <= 1e-4f * size + 1e-6f)) atomicAdd(counters + 1, 1u);
}

// Writes the product's scores to shared memory, checks them and reads them back.
template <class In, class T>
__device__ __forceinline__ void keep_scores(const Params& p, unsigned char* mine, const unsigned char* query_rows,
                                            const unsigned char* k_tile, ScoresOf<T>& s, int lane) {
  const int g = lane >> 2, t = lane & 3;
  const auto at = [&](int r, int half, int n) {
    return reinterpret_cast<float2*>(mine + (r * 16 + half * 8 + g) * T::kScoreRow + (n * 8 + 2 * t) * 4);
  };
  __syncwarp();
#pragma unroll
  for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
    for (int i = 0; i < T::kKeyTiles * 2; i++)
      *at(r, i % 2, i / 2) = make_float2(s[r][i / 2][i % 2 * 2], s[r][i / 2][i % 2 * 2 + 1]);
  __syncwarp();
  for (int i = lane; i < T::kRows * T::kN; i += 32) {
    const int row = i / T::kN, key = i % T::kN;
    float wanted = 0.f, size = 0.f;
    for (int d = 0; d < T::kDim; d++) {
      const float x = element_of<In, T>(query_rows, row, d) * element_of<In, T>(k_tile, key, d);
      wanted += x;
      size += fabsf(x);
    }
    count(p.check, reinterpret_cast<const float*>(mine + row * T::kScoreRow)[key], wanted, size);
  }
#pragma unroll
  for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
    for (int i = 0; i < T::kKeyTiles * 2; i++) {
      const float2 x = *at(r, i % 2, i / 2);
      s[r][i / 2][i % 2 * 2] = x.x;
      s[r][i / 2][i % 2 * 2 + 1] = x.y;
    }
  __syncwarp();
}

// Writes the weights of 16 keys to shared memory and reads them back.
template <class T>
__device__ __forceinline__ void keep_weights(unsigned char* mine, int step, unsigned (&w)[T::kRowTiles][4], int lane) {
  const int g = lane >> 2, t = lane & 3;
  const auto at = [&](int r, int i) {
    const int row = r * 16 + i % 2 * 8 + g, key = step * 16 + i / 2 * 8 + 2 * t;
    return reinterpret_cast<unsigned*>(mine + row * T::kScoreRow + key * 2);
  };
#pragma unroll
  for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
    for (int i = 0; i < 4; i++) *at(r, i) = w[r][i];
  __syncwarp();
#pragma unroll
  for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
    for (int i = 0; i < 4; i++) w[r][i] = *at(r, i);
}

// Checks what the second product added to `before` against the weights in shared memory.
template <class In, class T>
__device__ __forceinline__ void check_out(const Params& p, const unsigned char* mine, const unsigned char* v_tile,
                                          const State<T>& st, const float (&before)[T::kRowTiles][T::kDimTiles][4],
                                          int lane) {
  const int g = lane >> 2, t = lane & 3;
  for (int r = 0; r < T::kRowTiles; r++)
    for (int d = 0; d < T::kDimTiles; d++)
      for (int i = 0; i < 4; i++) {
        const unsigned char* row = mine + (r * 16 + i / 2 * 8 + g) * T::kScoreRow;
        float wanted = before[r][d][i], size = fabsf(wanted);
        for (int key = 0; key < T::kN; key++) {
          const float weight = to_float(In{reinterpret_cast<const unsigned short*>(row)[key]});
          const float x = weight * element_of<In, T>(v_tile, key, d * 8 + 2 * t + i % 2);
          wanted += x;
          size += fabsf(x);
        }
        count(p.check + 2, st.out[r][d][i], wanted, size);
      }
  __syncwarp();
}
