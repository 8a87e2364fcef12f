// Attention of a few queries over the pages of all tiers: a warp takes stages off the work list and keeps one streaming
// softmax in registers for as long as they belong to the same KV head and tier.
//
//   page --bulk copy--> ring in shared memory --16-byte loads--> words --masks--> A operands
//   K: tokens are the 16 rows of the product, columns (query heads of the KV head, times queries) its 8 columns
//   V: dims are the rows; the weights are transposed between the two products by movmatrix
//
// With kMass the kernel makes a second pass over K alone, after combine.cu: m is then the log-sum-exp of all scores, and the
// output is the weight of every token, summed over the columns. With kObserve the result is added to the importance of tokens
// in their pages instead (observe.py). Code that a pass or a cache does not need is not compiled into its kernel: mixed tiers
// wait for instructions, and 330 more of 5,500, never executed, took 4 % on an H200 (docs/perf-log.md).
//
//   decode_stage.cuh   loading of pages     decode_codes.cuh  a stage of codes    decode_softmax.cuh  scores to weights
//   decode_query.cuh   queries as operands  decode_rows.cuh   a stage of rows     decode_state.cuh    shared state
//   decode_partial.cuh a warp's result      packed.cu         the same for blocks of packed pages
#include "decode_codes.cuh"
#include "decode_partial.cuh"
#include "decode_query.cuh"
#include "decode_rows.cuh"
#include "decode_stage.cuh"
#include "pdl.cuh"

// Dispatches a stage to the code of its tier.
template <class In, bool kMass, bool kObserve, bool kOrdered, int kDim, int kPageTokens, int kN, int kNumber>
__device__ __forceinline__ void attend(Tiers<>, const Params&, State<kDim, kN>&, unsigned char*, unsigned, int) {}
template <class In, bool kMass, bool kObserve, bool kOrdered, int kDim, int kPageTokens, int kN, int kNumber, class T, class... Ts>
__device__ __forceinline__ void attend(Tiers<T, Ts...>, const Params& p, State<kDim, kN>& st, unsigned char* stage,
                                       unsigned meta, int bucket) {
  using P = Part<T, kDim, kPageTokens, kOrdered>;
  if (tier_of(meta) == kNumber) {
    const int tokens = tokens_of(meta);
    if constexpr (T::kPlain) attend_rows<In, P, kMass, kObserve>(p, st, stage, tokens, bucket, part_of(meta) * P::kTokens);
    else attend_codes<T, P, kMass, kObserve>(p, st, stage, tokens, bucket);
  } else {
    attend<In, kMass, kObserve, kOrdered, kDim, kPageTokens, kN, kNumber + 1>(Tiers<Ts...>{}, p, st, stage, meta, bucket);
  }
}

template <bool kBalanced>
struct TieredParams : Params {
  static constexpr Balance kBalance = kBalanced ? kPowers : kUnbalanced;
};

// kResident: warps per multiprocessor. kOrdered: visibility depends on positions, as with several queries or a window.
template <class In, bool kMass, bool kObserve, bool kBalanced, bool kRows, bool kOrdered, int kDim, int kPageTokens, int kN,
          int kWarps, int kResident, class TierList>
__global__ void __launch_bounds__(kWarps * 32, kResident / kWarps)
    decode(const __grid_constant__ TieredParams<kBalanced> p) {
  constexpr int kSlot = slot_bytes<kDim, kPageTokens>(TierList{});
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ unsigned long long bars[kWarps * 2];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), block = blockIdx.y + (kObserve ? p.first_block : 0);
  unsigned char* slots = shared + warp * 2 * kSlot;
  Ring<2> ring(bars + warp * 2);
  wait_for_previous();
  release_next();
  if (kObserve && !p.weights[p.rows]) return;  // not observed in this step

  // Blocks i, i + multiprocessors, .. share a multiprocessor; they take adjacent chunks.
  const int wave = divide(blockIdx.x, p.by_multiprocessors), resident = divide(gridDim.x, p.by_multiprocessors);
  const int number = (blockIdx.x - wave * p.multiprocessors) * resident + wave;
  for (int chunk = number * kWarps + warp; chunk < p.chunks; chunk += gridDim.x * kWarps) {
    const int first = p.parts[chunk].begin, end = p.parts[chunk].end, partial = p.parts[chunk].number;
    Stage now = p.parts[chunk].first;
    if (first >= end) continue;
    const auto produce = [&](int buffer, const Stage& stage) {
      const Sizes size = sizes_of<kDim, kPageTokens>(TierList{}, tier_of(stage.meta));
      if constexpr (kRows) fill_rows<kMass, kDim>(p, ring, buffer, slots + buffer * kSlot, stage, size);
      else fill<kMass>(ring, buffer, slots + buffer * kSlot, stage, size, p.position_bytes);
    };
    produce(0, now);
    ring.commit();
    Stage next = p.stages[min(first + 1, end - 1)], after = p.stages[min(first + 2, end - 1)];
    State<kDim, kN> st;
    int bucket = -1;
    for (int i = first;; i++) {
      const int buffer = (i - first) & 1;
      const bool another = i == end || now.bucket != bucket;
      if (another) {
        if (bucket >= 0 && !kMass) end_bucket(p, st, bucket, partial, block);
        if (i == end) break;
        bucket = now.bucket;
        load_query(p, st, now, block);
      }
      if (i + 1 < end) produce(buffer ^ 1, next);
      ring.commit();
      if (next.bucket != now.bucket) expect_query<kDim, kN>(p, next, block);
      if (another) begin_bucket<In, kMass, kObserve, kOrdered>(p, st, now, block);  // overlaps the copy of the page
      ring.wait(buffer, 2);
      bool skip = false;
      if constexpr (kObserve) {
        skip = !st.weight || now.meta & kSpokenFor;
        const int tier = tier_of(now.meta), tokens = sizes_of<kDim, kPageTokens>(TierList{}, tier).tokens;
        st.importance = reinterpret_cast<float*>(now.page + p.importance_offset[tier]) + part_of(now.meta) * tokens;
      }
      if (!skip)
        attend<In, kMass, kObserve, kOrdered, kDim, kPageTokens, kN, 0>(TierList{}, p, st, slots + buffer * kSlot, now.meta, bucket);
      __syncwarp();
      now = next;
      next = after;
      after = p.stages[min(i + 3, end - 1)];
    }
    __syncwarp();
  }
}
