// Combines the partials of decode.cu into outputs.
//
//   combine        one block per column: its warps split the partials, and their sums are reduced at the end
//   combine_alone  one warp per column: with few partials the reduction would dominate
#include "combine.cuh"

struct Params {
  const float* partial_out;    // [slots, column blocks, columns of a block, D]
  const float2* partial_sum;   // [slots, column blocks, columns of a block]: reference m (log2) and sum l
  const Slots* slots;          // [tiers, rows * kv heads]
  unsigned short* out;         // [rows, queries, heads, D]
  float* lse;                  // [rows, queries, heads], or null
  const float* sinks;          // [heads], or null
  const char* q;               // [rows, queries, heads, D], strides in bytes below
  const float* centre;         // [requests, kv heads, D], stride below, or null for none
  const int* requests;         // [rows], or null
  i64 q_row, q_query, q_head, centre_request;
  unsigned long long by_columns, by_group, by_kv_heads;  // for divide()
  int queries, group, kv_heads, blocks, block_columns, tiers, head_caches;
  float scale_log2;

  static constexpr bool kBalances = false, kRows = true, kRehearses = false;
  __device__ __forceinline__ int queries_of(int) const { return queries; }
  __device__ __forceinline__ i64 first_query(int row) const { return static_cast<i64>(row) * queries; }
  __device__ __forceinline__ i64 query_offset(int row) const { return row * q_row; }
  __device__ __forceinline__ const float* centre_of(int row) const {
    return centre + (requests ? requests[row] : row) * centre_request;
  }
  // Partials of a column's head cache in the tier that has the lane's number.
  __device__ __forceinline__ Slots slots_of(const Column& column) const {
    const int lane = threadIdx.x & 31;
    Slots partials = {0, 0};
    if (lane < tiers) {
      const int2 pair = __ldcg(reinterpret_cast<const int2*>(slots) + lane * head_caches + column.head_cache);
      partials.first = pair.x, partials.count = pair.y;
    }
    return partials;
  }
};

template <class In, int kDim>
__global__ void __launch_bounds__(128) combine_alone(const __grid_constant__ Params p) {
  combine_column_alone<In, kDim, 16>(p);
}

template <class In, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 4 ? 8 : 1) combine(const __grid_constant__ Params p) {
  combine_column<In, kDim, kWarps, (kWarps > 8 ? 16 / ((kDim + 127) / 128) : 4)>(p);
}
