// Work of a decode step over packed blocks, split into chunks by every warp for itself from the lengths of the requests: no
// list, nothing that the host or another kernel has to prepare.
//
// A stage is stage_tokens consecutive tokens of one page; the stages of a request and KV head form a head cache, and
// head caches are ordered by (request, KV head). All KV heads of a request cost the same, so prefix sums over requests give
// the start of each head cache.
// Chunk k is the stages whose cumulative cost ends in k * size .. (k + 1) * size: it may begin and end inside a head cache.
// Chunks and head caches only increase along the work, so chunk + head cache identifies one partial. With `split` a chunk is
// `split` stages of one head cache, whatever else is in the batch.
//
// In an even batch, equal shares of every head cache are about as good: blocks are then assigned to head caches by index,
// block b to head cache b % head_caches, so that a warp knows what to read before it knows the lengths. The warps of a block
// alternate between stages of the head cache and merge their partials; there is one partial per block.
//
// With kPlain a request may have unquantised rows in addition to its pages (store/packed/plain_rows.py): its first tokens, and
// those after its last full page. They are stages of 16 tokens after those of codes in the same head cache, cost as much, and
// have a separate partial: its number is 2 * n + 1 for head cache n, and 2 * n for codes.
#pragma once
#include "divide.cuh"
#include "work.cuh"

constexpr int kPlainTokens = 16;  // tokens per stage of plain rows

template <bool kPlain>
struct PackedWork {
  static constexpr bool kHasPlain = kPlain;
  const int* seq_lens;     // [rows]
  const int* cu_queries;   // [rows + 1], or null: every row has `most_queries`
  const int *tail_slots, *sink_slots;        // [rows], or null: none
  int rows, kv_heads, group, most_queries, window;  // window 0: none
  int stage_bits, max_tokens;                // a stage has 2^stage_bits tokens; tokens that a row of the block table can list
  int cost, begin, few_cost, few_begin;      // of a stage and of starting a head cache; the second pair up to `few` stages
  int few, chunks, split;
  int splits, block_warps;                   // even batch: blocks per head cache, 0: never even; warps per block
  int multiprocessors, workers;              // workers: resident warps per multiprocessor
  int tail_requests, sink_requests;          // number of slots of tail and sink rows
  int sink_tokens, page_bits;                // a page has 2^page_bits tokens
  unsigned long long by_splits;              // for divide(): warps of a head cache in an even batch

  // Plain loads: read-only loads could be moved before the wait for the kernel that wrote the lengths.
  __device__ __forceinline__ int first_query(int row) const { return cu_queries ? cu_queries[row] : row * most_queries; }
  __device__ __forceinline__ int queries_of(int row) const {
    return cu_queries ? min(cu_queries[row + 1] - cu_queries[row], most_queries) : most_queries;
  }
  __device__ __forceinline__ int length_of(int row) const { return min(max(seq_lens[row], 0), max_tokens); }

  static __device__ __forceinline__ int slot_of(const int* slots, int requests, int row) {
    const int slot = slots ? slots[row] : -1;
    return static_cast<unsigned>(slot) < static_cast<unsigned>(requests) ? slot : -1;
  }
  __device__ __forceinline__ int tail_slot(int row) const { return slot_of(tail_slots, tail_requests, row); }
  __device__ __forceinline__ int sink_slot(int row) const { return slot_of(sink_slots, sink_requests, row); }
  static __device__ __forceinline__ int plain_stages(int tokens) { return (tokens + kPlainTokens - 1) / kPlainTokens; }
  // Shifts instead of divisions: every warp waits for them.
  __device__ __forceinline__ int stages_before(int position) const { return position >> stage_bits; }
  __device__ __forceinline__ int stages_to(int position) const { return (position + (1 << stage_bits) - 1) >> stage_bits; }

  // Stages of a row for the columns from `column` on: none if its queries have no such column. Those before `first` are
  // outside every query's window. kPlain: the first `codes` of `stages` are pages, followed by those of sink rows, which
  // hold positions below `sinks`, and of the tail, which begins at `packed`.
  struct Row {
    int length, first, stages, codes, sinks, packed;
    __device__ __forceinline__ int sink_stages() const { return stages - codes - plain_stages(length - packed); }
  };
  __device__ __forceinline__ Row row(int number, int column) const {
    Row x = {};
    if (number >= rows) return x;
    const int queries = queries_of(number);
    x.length = length_of(number);
    if (queries * group <= column) return x;
    if constexpr (kPlain) {
      const int low = window ? max(x.length - queries - window + 1, 0) : 0;  // first position that a query sees
      x.packed = tail_slot(number) < 0 ? x.length : x.length >> page_bits << page_bits;
      x.sinks = sink_slot(number) < 0 ? 0 : min(sink_tokens, x.packed);
      x.first = stages_before(max(low, x.sinks));
      x.codes = x.sinks < x.packed ? max(stages_to(x.packed) - x.first, 0) : 0;
      x.stages = x.codes + (low < x.sinks ? plain_stages(x.sinks) : 0) + plain_stages(x.length - x.packed);
    } else {
      if (window) x.first = stages_before(max(x.length - queries - window + 1, 0));
      x.stages = stages_to(x.length) - x.first;
    }
    return x;
  }
};

// For non-negative numbers.
__device__ __forceinline__ int quotient(int x, int by) { return static_cast<unsigned>(x) / static_cast<unsigned>(by); }
__device__ __forceinline__ int quotient_up(int x, int by) { return quotient(x + by - 1, by); }
__device__ __forceinline__ int sum_of_warp(int x) { return __reduce_add_sync(~0u, static_cast<unsigned>(x)); }

// The split of a step for one block of columns, the same for all its warps.
struct PackedCut {
  int column;       // first column of the block
  int cost, begin;  // cost of a stage and of starting a head cache; with `split` 1 and 0
  int size, used;   // cost of a chunk; number of chunks
  int split;
  int deep;         // even batch: maximum stages per warp; else 0

  PackedCut() = default;
  // Called by whole warps.
  template <class W>
  __device__ __forceinline__ PackedCut(const W& w, int first_column) : column(first_column) {
    int head_caches = 0, stages = 0;
    unsigned longest = 0;
#pragma unroll 1
    for (int r = threadIdx.x & 31; r < w.rows; r += 32) {
      const int n = w.row(r, column).stages;
      head_caches += n > 0;
      longest = max(longest, static_cast<unsigned>(n));
      stages += w.split ? quotient_up(n, w.split) : n;
    }
    head_caches = sum_of_warp(head_caches) * w.kv_heads, stages = sum_of_warp(stages) * w.kv_heads;
    split = w.split, deep = 0;
    if (split) {
      cost = size = 1, begin = 0, used = stages;
      return;
    }
    const bool few = stages <= w.few;
    cost = few ? w.few_cost : w.cost, begin = few ? w.few_begin : w.begin;
    const int all = head_caches * begin + stages * cost, share = quotient_up(all, w.chunks);
    // One stage per chunk if there are that few; else at least two, since some chunks would get two anyway.
    size = share <= cost ? cost : max(2 * cost, share);
    if (w.splits) {
      const int warps = w.splits * w.block_warps;
      const int equal = divide(static_cast<int>(__reduce_max_sync(~0u, longest)) + warps - 1, w.by_splits);
      // What equal shares save: a second head cache in most chunks, and the search for the first.
      if (equal && equal * cost <= size + begin + begin / 4) deep = equal;
    }
    used = deep ? 0 : quotient_up(all, size);
  }

  // Blocks per head cache in an even batch.
  template <class W>
  __device__ __forceinline__ int blocks_of(const W& w, int stages) const {
    return quotient_up(stages, deep * w.block_warps);
  }

  // Cost of a head cache.
  __device__ __forceinline__ int of(int stages) const {
    if (split) return quotient_up(stages, split);
    return stages ? begin + stages * cost : 0;
  }
};

// State of a warp in shared memory: what is only needed when it changes head caches would take registers.
template <class W>
struct PackedPlace {
  PackedCut cut;
  typename W::Row row;  // row of the head cache
  int base, cost;       // start of its cost, and its cost
  int limit;            // cost at which the chunk ends
  int step;             // from one stage to the next: 1 except in an even batch
};

// Iterates over the stages of a warp; called by whole warps.
template <class W>
struct PackedWalk {
  int head_cache;
  int at, end;  // stages of the head cache; those of its row begin at row.first
  int length;   // of the row

  __device__ __forceinline__ bool live() const { return at < end; }

  // Stages `first`, `first + step`, .. of a head cache.
  __device__ __forceinline__ void of_head_cache(PackedPlace<W>& place, const typename W::Row& row, int number, int first,
                                                int step) {
    head_cache = number, at = row.first + first, end = row.first + row.stages, length = row.length;
    if (!(threadIdx.x & 31)) place.row = row, place.step = step;
    __syncwarp();
  }

  // Stages of a chunk.
  __device__ __forceinline__ void of_chunk(const W& w, PackedPlace<W>& place, int chunk) {
    const PackedCut& cut = place.cut;
    const int begin = chunk * cut.size, lane = threadIdx.x & 31;
    typename W::Row row;
    int number, base = 0, cost;  // of the row in which `begin` falls
#pragma unroll 1
    for (int first = 0;; first += 32) {
      row = w.row(first + lane, cut.column);
      cost = cut.of(row.stages);
      int to = cost * w.kv_heads;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(~0u, to, d);
        if (lane >= d) to += before;
      }
      const unsigned past = __ballot_sync(~0u, base + to > begin);
      if (past || first + 32 >= w.rows) {
        const int from = past ? __ffs(past) - 1 : 31;
        number = first + from;
        row = w.row(number, cut.column);
        cost = __shfl_sync(~0u, cost, from);
        base += __shfl_sync(~0u, to, from) - cost * w.kv_heads;
        break;
      }
      base += __shfl_sync(~0u, to, 31);
    }
    const int head = cost ? quotient(begin - base, cost) : 0;
    base += head * cost;
    head_cache = number * w.kv_heads + head, length = row.length;
    int limit = begin + cut.size;
    if (cut.split) {
      at = (chunk - base) * cut.split;
      end = min(at + cut.split, row.stages);
    } else {
      at = quotient(max(begin - base - cut.begin, 0), cut.cost);
      end = end_of(cut, row, base, limit);
    }
    at += row.first, end += row.first;
    __syncwarp();
    if (!lane) place.row = row, place.base = base, place.cost = cost, place.limit = limit, place.step = 1;
    __syncwarp();
  }

  static __device__ __forceinline__ int end_of(const PackedCut& cut, const typename W::Row& row, int base, int limit) {
    return min(quotient(max(limit - base - cut.begin, 0), cut.cost), row.stages);
  }

  // Moves to the next head cache with a stage of this chunk; not live if there is none.
  __device__ __forceinline__ void next_head_cache(const W& w, PackedPlace<W>& place) {
    const PackedCut& cut = place.cut;
    at = end;
    if (cut.split || cut.deep) return;
    const int base = place.base + place.cost, limit = place.limit;
    if (base >= limit) return;
    typename W::Row row = place.row;
    int number = quotient(++head_cache, w.kv_heads);
    const bool same_row = number * w.kv_heads != head_cache;
    if (!same_row) {
      do {
        if (number >= w.rows) return;
        row = w.row(number++, cut.column);
      } while (!row.stages);
      head_cache = (number - 1) * w.kv_heads;
    }
    at = row.first, end = row.first + end_of(cut, row, base, limit), length = row.length;
    __syncwarp();
    if (!(threadIdx.x & 31)) {
      place.base = base;
      if (!same_row) place.row = row, place.cost = cut.of(row.stages);
    }
    __syncwarp();
  }

  // Moves to the next stage, or with `begins` to the first; not live if there is none.
  __device__ __forceinline__ void next(const W& w, PackedPlace<W>& place, bool begins) {
    at += begins ? 0 : place.step;
    if (at >= end) next_head_cache(w, place);
  }
};

// Partials of one head cache in a block of columns; called by whole warps. kPlain: those of plain rows to
// lane 0, those of codes to the others.
template <class W>
__device__ __forceinline__ Slots partials_of(const W& w, int head_cache, int row_number, int head, int column) {
  const PackedCut cut(w, column);
  const typename W::Row row = w.row(row_number, column);
  if (cut.deep) return {head_cache * w.splits, cut.blocks_of(w, row.stages)};
  int before = 0;
#pragma unroll 1
  for (int r = threadIdx.x & 31; r < row_number; r += 32) before += cut.of(w.row(r, column).stages);
  const int base = sum_of_warp(before) * w.kv_heads + head * cut.of(row.stages);
  int from = 0, end = row.stages;  // stages of the partials
  if constexpr (W::kHasPlain) {
    const bool plain = !(threadIdx.x & 31);
    from = plain ? row.codes : 0, end = plain ? row.stages : row.codes, head_cache = 2 * head_cache + plain;
  }
  if (from >= end) return {0, 0};
  if (cut.split) return {base + from / cut.split + head_cache, (end - 1) / cut.split - from / cut.split + 1};
  const int first = (base + cut.begin + (from + 1) * cut.cost - 1) / cut.size;
  return {first + head_cache, (base + cut.begin + end * cut.cost - 1) / cut.size - first + 1};
}
