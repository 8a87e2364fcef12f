// Combines the partials of packed.cu into outputs; slots of partials follow from the lengths (packed_work.cuh).
#include "combine.cuh"
#include "packed_work.cuh"

template <bool kPlain>
struct Params {
  const float* partial_out;   // [slots, column blocks, columns of a block, D]
  const float2* partial_sum;  // [slots, column blocks, columns of a block]: reference m (log2) and sum l
  unsigned short* out;        // [queries of all rows, heads, D]
  float* lse;                 // [queries of all rows, heads], or null
  const float* sinks;         // [heads], or null
  const char* q;              // [queries of all rows, heads, D], strides in bytes below
  const float* centre;        // [kv heads, D], or null
  const float* balance;       // [kv heads, D], or null
  i64 q_query, q_head;
  unsigned long long by_columns, by_group, by_kv_heads;  // for divide()
  int queries, group, kv_heads, blocks, block_columns, tiers, head_caches;
  float scale_log2;
  PackedWork<kPlain> work;

  static constexpr bool kBalances = true, kRows = kPlain, kRehearses = true;
  __device__ __forceinline__ int queries_of(int row) const { return work.queries_of(row); }
  __device__ __forceinline__ i64 first_query(int row) const { return work.first_query(row); }
  __device__ __forceinline__ i64 query_offset(int row) const { return work.first_query(row) * q_query; }
  __device__ __forceinline__ const float* centre_of(int) const { return centre; }
  // Tier 0 is plain rows.
  __device__ __forceinline__ Slots slots_of(const Column& column) const {
    const int first = column.number / block_columns * block_columns;
    const Slots found = partials_of(work, column.head_cache, column.row, column.kv_head, first);
    const int tier = threadIdx.x & 31;
    return tier == 1 || (kPlain && tier == 0) ? found : Slots{0, 0};
  }
};

// Few partials at a time, so that blocks fit next to those of packed.cu: everything before their wait is then hidden.
constexpr int kAhead = 8;

template <class In, int kDim, bool kPlain>
__global__ void __launch_bounds__(128, 6) combine_packed_alone(const __grid_constant__ Params<kPlain> p) {
  combine_column_alone<In, kDim, kAhead>(p);
}

template <class In, int kDim, int kWarps, bool kPlain>
__global__ void __launch_bounds__(kWarps * 32, kWarps == 4 ? 8 : kWarps == 8 ? 3 : 1)
    combine_packed(const __grid_constant__ Params<kPlain> p) {
  combine_column<In, kDim, kWarps, (kWarps > 4 ? kAhead / ((kDim + 127) / 128) : 4)>(p);
}
