// Shared by the parts of decode.cu: its parameters, and the register state of a warp.
#pragma once
#include "divide.cuh"
#include "mma.cuh"
#include "page.cuh"
#include "work.cuh"

struct Params {
  const char* q;          // [rows, queries, heads, D]
  const Stage* stages;    // those of the layer
  const Chunk* parts;     // [chunks]
  const int* requests;    // [rows], or null
  const int* lengths;     // [requests], stride in ints below
  const float* centre;    // [requests, kv heads, D], stride below; read with kMass or softcap
  const signed char* balance;  // same shape and stride, or null: exponents of the powers of two that queries are multiplied by
  float* partial_out;     // [slots, column blocks, columns, D]; kMass: the mass [rows, kv heads, mass_length], zeros
  float2* partial_sum;    // [slots, column blocks, columns]: m, l
  const float* lse;       // kMass: [rows, queries, heads]
  i64 q_row, q_query, q_head;  // strides in bytes
  i64 length_stride, centre_request;
  int queries, group, kv_heads, chunks;
  int head_caches, multiprocessors;
  float scale_log2, softcap_log2;  // softcap 0: none
  int window, position_bytes;      // window 0: none; position_bytes 0: positions are not read
  int mass_length;
  i64 row_bytes, v_offset;         // rows in pages: from one token to the next, from K to V; 0: pages of a tiered cache
  unsigned long long by_group, by_kv_heads, by_multiprocessors;  // for divide()
  const int* weights;              // kObserve: [rows + 1] of observe.cu
  float log2_decay;                // decay of the moving average
  int rows, ema;
  int first_block;                 // first column block; importance takes one launch per block, since all write the same entries
  int importance_offset[kMaxTiers];  // in a page

  // Queries of a row, and where the first of them is.
  static constexpr bool kRagged = false;  // True if rows have different numbers of queries
  __device__ __forceinline__ int queries_of(int) const { return queries; }
  __device__ __forceinline__ const char* query_row(int row) const { return q + row * q_row; }
};

// Balance of K, undone by the queries: none; powers of two, Params::balance; or factors in the model's dtype (packed.cu).
enum Balance { kUnbalanced, kPowers, kFactors };

constexpr float kNone = -1e30f;

// The reference m of a column that has seen no token yet: -0, which no other sum produces. A separate flag would cost a
// register.
constexpr float kNotBegun = -0.f;
__device__ __forceinline__ bool has_begun(float m) { return __float_as_uint(m) != 0x80000000u; }

__device__ __forceinline__ float2 halves_of(unsigned x) {
  return make_float2(to_float(f16{static_cast<unsigned short>(x)}), to_float(f16{static_cast<unsigned short>(x >> 16)}));
}

// A column of the products: a query and a query head of the KV head. A lane has columns 2t and 2t + 1 of each block of 8.
template <int kDim, int kN>
struct State {
  static constexpr int kSteps = kDim / 16;
  unsigned q[kN][kSteps][2];  // B operands: rotated and scaled fp16 (codes), or unchanged (plain rows)
  float out[kN][kSteps][4];
  float m[kN][2], l[kN][2];
  float weights[kN][4];  // of the stage, summed by the tensor cores; every row is the same
  float middle[kN][2];   // sum of a column's q
  float centre[kN][2];   // score of the centre in log2 units, or 0 where combine.cu adds it
  float score;           // factor from a product with q to a score in log2 units
  int shift;             // exponent by which the second half of q is scaled down
  int exponent;          // rows g + 8 of `out` are times 2^-exponent; rows g times 2^-24
  int queries;           // of the request; unused without positions if all rows have as many
  int first;             // position of the first query; unused without positions
  int skip;              // packed.cu: positions before it are read elsewhere
  int weight;            // kObserve: number of queries that the row represents
  float gain;            // factor of the moving average
  float* importance;     // of the stage's tokens
};

template <class In>
__device__ __forceinline__ float2 pair_to_float(unsigned x) {
  return make_float2(to_float(In{static_cast<unsigned short>(x)}), to_float(In{static_cast<unsigned short>(x >> 16)}));
}

// From the lane that has column g (any t) to those that have columns 2t and 2t + 1.
__device__ __forceinline__ void to_columns(float of_g, float (&columns)[2]) {
  const int t = threadIdx.x & 3;
  columns[0] = __shfl_sync(~0u, of_g, 8 * t);
  columns[1] = __shfl_sync(~0u, of_g, 8 * t + 4);
}
__device__ __forceinline__ float sum_over_t(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
