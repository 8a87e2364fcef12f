// Work of a decode step over packed blocks, cut into chunks by every warp for itself from the lengths of the requests: no
// list, nothing that the host or another kernel prepares.
//
// A stage is stage_tokens consecutive tokens of one page; the stages of a request and KV head are those of a head cache, and
// head caches are ordered by (request, KV head). All KV heads of a request cost the same, so sums over requests give the
// place of a head cache.
// Chunk k is the stages in which cost k * size .. (k + 1) * size ends: it may begin and end amid a head cache. Chunks and
// head caches only increase along the work, so chunk + head cache identifies one partial. With `split` a chunk is `split`
// stages of one head cache, whatever else is in the batch.
//
// With kPlain a request may have unquantised rows beside its pages (store/packed/plain_rows.py): its first tokens, and those
// behind its last full page. They are stages of 16 tokens behind those of codes in the same head cache, cost as much as
// those, and make a partial of their own: 2 * n + 1 then takes the place of the head cache's number n, and 2 * n for codes.
#pragma once
#include "divide.cuh"
#include "work.cuh"

constexpr int kPlainTokens = 16;  // of a stage of plain rows

template <bool kPlain>
struct PackedWork {
  static constexpr bool kHasPlain = kPlain;
  const int* seq_lens;     // [rows]
  const int* cu_queries;   // [rows + 1], or null: every row has `most_queries`
  const int *tail_slots, *sink_slots;        // [rows], or null: none
  int rows, kv_heads, group, most_queries, window;  // window 0: none
  int stage_tokens, max_tokens;              // max_tokens: what a row of the block table can list
  int cost, begin, few_cost, few_begin;      // of a stage and of starting a head cache; the second pair up to `few` stages
  int few, chunks, split;
  int multiprocessors, workers;              // workers: resident warps of a multiprocessor
  int tail_requests, sink_requests;          // slots of tail and sink rows that there are
  int sink_tokens, page_tokens;

  // Plain loads: those through the read-only path may be moved before the wait for the kernel that wrote the lengths.
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

  // Stages of a row for the columns from `column` on: none if its queries have no such column. Those before `first` are
  // outside every query's window. kPlain: of `stages` the first `codes` are of pages, then come those of sink rows, which
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
      x.packed = tail_slot(number) < 0 ? x.length : x.length / page_tokens * page_tokens;
      x.sinks = sink_slot(number) < 0 ? 0 : min(sink_tokens, x.packed);
      x.first = max(low, x.sinks) / stage_tokens;
      x.codes = x.sinks < x.packed ? max((x.packed + stage_tokens - 1) / stage_tokens - x.first, 0) : 0;
      x.stages = x.codes + (low < x.sinks ? plain_stages(x.sinks) : 0) + plain_stages(x.length - x.packed);
    } else {
      if (window) x.first = max(x.length - queries - window + 1, 0) / stage_tokens;
      x.stages = (x.length + stage_tokens - 1) / stage_tokens - x.first;
    }
    return x;
  }
};

__device__ __forceinline__ int sum_of_warp(int x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

// The cut of a step for one block of columns, the same for all its warps.
struct PackedCut {
  int column;       // the block's first
  int cost, begin;  // of a stage and of starting a head cache; with `split` 1 and 0
  int size, used;   // cost of a chunk; number of chunks
  int split;

  // Called by whole warps.
  template <class W>
  __device__ __forceinline__ PackedCut(const W& w, int first_column) : column(first_column) {
    int head_caches = 0, stages = 0;
    for (int r = threadIdx.x & 31; r < w.rows; r += 32) {
      const int n = w.row(r, column).stages;
      head_caches += n > 0;
      stages += w.split ? (n + w.split - 1) / w.split : n;
    }
    head_caches = sum_of_warp(head_caches) * w.kv_heads, stages = sum_of_warp(stages) * w.kv_heads;
    split = w.split;
    if (split) {
      cost = size = 1, begin = 0, used = stages;
      return;
    }
    const bool few = stages <= w.few;
    cost = few ? w.few_cost : w.cost, begin = few ? w.few_begin : w.begin;
    const int all = head_caches * begin + stages * cost, share = (all + w.chunks - 1) / w.chunks;
    // One stage per chunk if there are that few; else at least two, since some chunks would get two anyway.
    size = share <= cost ? cost : max(2 * cost, share);
    used = (all + size - 1) / size;
  }

  // Cost of a head cache.
  __device__ __forceinline__ int of(int stages) const {
    if (split) return (stages + split - 1) / split;
    return stages ? begin + stages * cost : 0;
  }
};

// A head cache of the work: its row and KV head, and where its cost begins.
template <class W>
struct PackedHeadCache {
  typename W::Row row;
  int number, head, base, cost;  // number: of the row
};

// The head cache in which the cost `x` falls; called by whole warps.
template <class W>
__device__ __forceinline__ PackedHeadCache<W> head_cache_at(const W& w, const PackedCut& cut, int x) {
  const int lane = threadIdx.x & 31;
  int base = 0;
  for (int first = 0;; first += 32) {
    const typename W::Row row = w.row(first + lane, cut.column);
    const int cost = cut.of(row.stages);
    int end = cost * w.kv_heads;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int before = __shfl_up_sync(~0u, end, d);
      if (lane >= d) end += before;
    }
    const unsigned past = __ballot_sync(~0u, base + end > x);
    if (past || first + 32 >= w.rows) {
      const int from = past ? __ffs(past) - 1 : 31;
      PackedHeadCache<W> g;
      g.number = first + from;
      if constexpr (W::kHasPlain) g.row = w.row(g.number, cut.column);
      else g.row = {__shfl_sync(~0u, row.length, from), __shfl_sync(~0u, row.first, from), __shfl_sync(~0u, row.stages, from)};
      g.cost = __shfl_sync(~0u, cost, from);
      const int row_base = base + __shfl_sync(~0u, end, from) - g.cost * w.kv_heads;
      g.head = g.cost ? (x - row_base) / g.cost : 0;
      g.base = row_base + g.head * g.cost;
      return g;
    }
    base += __shfl_sync(~0u, end, 31);
  }
}

// Partials of one head cache in a block of columns; called by whole warps. kPlain: those of plain rows to
// lane 0, those of codes to the others.
template <class W>
__device__ __forceinline__ Slots partials_of(const W& w, int head_cache, int row_number, int head, int column) {
  const PackedCut cut(w, column);
  int before = 0;
  for (int r = threadIdx.x & 31; r < row_number; r += 32) before += cut.of(w.row(r, column).stages);
  const typename W::Row row = w.row(row_number, column);
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

// Stages of a chunk, one after the other.
template <class W>
struct PackedWalk {
  PackedHeadCache<W> g;
  int at, end;     // stages of the head cache, from row.first on
  int limit;       // cost at which the chunk ends
  bool live;

  __device__ __forceinline__ PackedWalk(const W& w, const PackedCut& cut, int chunk) {
    const int begin = chunk * cut.size;
    limit = begin + cut.size;
    g = head_cache_at(w, cut, begin);
    if (cut.split) {
      at = (chunk - g.base) * cut.split;
      end = min(at + cut.split, g.row.stages);
    } else {
      at = max(begin - g.base - cut.begin, 0) / cut.cost;
      end = end_of(cut);
    }
    live = at < end;
    if (!live) next_head_cache(w, cut);
  }

  __device__ __forceinline__ int end_of(const PackedCut& cut) const {
    return min(max(limit - g.base - cut.begin, 0) / cut.cost, g.row.stages);
  }

  // Moves to the next head cache with a stage of this chunk; live is false if there is none.
  __device__ __forceinline__ void next_head_cache(const W& w, const PackedCut& cut) {
    live = false;
    if (cut.split) return;
    for (;;) {
      g.base += g.cost;
      if (g.base >= limit) return;
      if (++g.head == w.kv_heads) {
        g.head = 0;
        do {
          if (++g.number >= w.rows) return;
          g.row = w.row(g.number, cut.column);
        } while (!g.row.stages);
        g.cost = cut.of(g.row.stages);
      }
      at = 0;
      end = end_of(cut);
      live = end > 0;
      return;
    }
  }

  __device__ __forceinline__ void next(const W& w, const PackedCut& cut) {
    if (++at == end) next_head_cache(w, cut);
  }
};
