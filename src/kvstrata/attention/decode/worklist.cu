// Builds the work list of decode.cu from counts and page tables, for every layer, on the device. Plain pages of rows, as
// store_kv writes them, are treated as a cache of one tier.
//
// A block works on one layer. Its threads sum the stages and costs of all buckets (a scan over the block), which gives the
// share of each worker; then its warps write the stages of the block's part of the heads. Blocks of one layer repeat the
// same scan and write different parts.
#include "page.cuh"
#include "pdl.cuh"
#include "work.cuh"

constexpr int kThreads = 1024, kAhead = 4;  // kAhead: stages per lane whose pages are looked up together

struct Params {
  const int* requests;           // [rows] row of table and count, or null: row i is request i
  const int* table;              // [requests, layers, kv heads, tiers, max pages]: handles
  const int* count;              // [requests, layers, kv heads, tiers]
  const unsigned long long* slabs;
  Stage* stages;                 // [layers, capacity]
  Chunk* parts;                  // [layers, chunks]
  Slots* slots;                  // [layers, tiers, rows * kv heads]
  const int* weights;            // [layers, rows + 1] of observe.cu, or null
  const int* state;              // [1] of observe.cu's state: 1 if pages are shared
  i64 table_request, table_layer, count_request, count_layer;  // strides, in ints
  unsigned long long plain;      // plain pages of one layer (page_bytes > 0): K of page 0; the table is [requests, pages]
  i64 page_bytes, head_bytes, row_bytes;
  int layer, rows, kv_heads, tiers, max_pages, units, capacity;
  int most;                      // capacity in chunks; without fixed_cost, their number
  int fixed_cost;                // 0, or the cost of a chunk of one bucket, independent of the other buckets
  int begin_cost;                // cost of starting a bucket; 0 with fixed_cost
  int few, few_begin;            // up to this many stages in all, few_cost and few_begin apply
  int multiprocessors, workers;  // resident warps per multiprocessor
  int page_tokens, stage_tokens[kMaxTiers], cost[kMaxTiers], few_cost[kMaxTiers];
};

// a / b, both at least 0. Costs of a layer fit 32 bits unless it has some hundred GB; then bit by bit. The compiler's
// own 64-bit division is a call and 100 instructions more, and the time of this kernel is that of fetching its code:
// loops below are not unrolled either.
__device__ __forceinline__ i64 quotient(i64 a, i64 b) {
  if (!((a | b) >> 31)) return static_cast<unsigned>(a) / static_cast<unsigned>(b);
  i64 q = 0, rest = 0;
#pragma unroll 1
  for (int bit = 62; bit >= 0; bit--) {
    rest = 2 * rest + (a >> bit & 1), q *= 2;
    if (rest >= b) rest -= b, q++;
  }
  return q;
}

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ __forceinline__ i64 ceil_div(i64 a, i64 b) { return quotient(a + b - 1, b); }

// Divides numbers of at least 0 by `by`, with one division when it is made.
struct Divider {
  unsigned by, inverse;

  __device__ __forceinline__ explicit Divider(int divisor) : by(max(divisor, 1)), inverse(~0u / by) {}

  // x / by, and the remainder. The product of x and the inverse is at most 1 less than the quotient.
  __device__ __forceinline__ int operator()(int x, int& rest) const {
    unsigned q = static_cast<unsigned>(static_cast<unsigned long long>(static_cast<unsigned>(x)) * inverse >> 32);
    unsigned r = x - q * by;
    if (r >= by) r -= by, q++;
    rest = r;
    return q;
  }
};

// Sums over buckets of stages. Costs of a large layer do not fit 32 bits.
struct Sums {
  int stages;
  i64 cost;
  i64 other;  // chunks with fixed_cost, else the cost where there are few stages

  __device__ __forceinline__ void add(const Sums& x) { stages += x.stages, cost += x.cost, other += x.other; }
};

// Inclusive sums over the lanes of a warp.
__device__ __forceinline__ Sums scan_warp(Sums x) {
#pragma unroll 1
  for (int d = 1; d < 32; d *= 2) {
    const Sums before = {__shfl_up_sync(~0u, x.stages, d), __shfl_up_sync(~0u, x.cost, d), __shfl_up_sync(~0u, x.other, d)};
    if ((threadIdx.x & 31) >= d) x.add(before);
  }
  return x;
}

// Exclusive sums over the block; `total` is that of all threads.
__device__ __forceinline__ Sums scan(const Sums& own, Sums& total) {
  __shared__ Sums of_warps[kThreads / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Sums x = scan_warp(own);
  if (lane == 31) of_warps[warp] = x;
  __syncthreads();
  if (warp == 0) of_warps[lane] = scan_warp(of_warps[lane]);
  __syncthreads();
  total = of_warps[kThreads / 32 - 1];
  Sums base = {x.stages - own.stages, x.cost - own.cost, x.other - own.other};
  if (warp) base.add(of_warps[warp - 1]);
  return base;
}

// Tokens of a tier: its count, clamped to the capacity of the page table.
__device__ __forceinline__ int held(const Params& p, const int* count, int tier) {
  return min(max(count[tier], 0), p.max_pages * p.page_tokens);
}

// One tier of a KV head.
__device__ __forceinline__ Sums measure(const Params& p, const int* count, int tier) {
  const int stages = ceil_div(held(p, count, tier), p.stage_tokens[tier]);
  if (!stages) return {0, 0, 0};
  const i64 cost = p.begin_cost + static_cast<i64>(stages) * p.cost[tier];
  const i64 few = p.few_begin + static_cast<i64>(stages) * p.few_cost[tier];
  return {stages, cost, p.fixed_cost ? ceil_div(cost, static_cast<i64>(p.fixed_cost)) : few};
}

__device__ __forceinline__ const int* counts_of(const Params& p, int layer, int row, int head) {
  const int request = p.requests ? p.requests[row] : row;
  if (p.page_bytes) head = 0;  // plain pages: one length for all heads
  return p.count + request * p.count_request + layer * p.count_layer + head * p.tiers;
}

// True if an earlier row that gives mass has the same page. Owners of a page have it at the same index of their lists.
__device__ __forceinline__ bool spoken_for(const Params& p, int layer, int row, i64 place, int handle) {
#pragma unroll 1
  for (int r = 0; r < row; r++)
    if (p.weights[layer * (p.rows + 1) + r] &&
        p.table[(p.requests ? p.requests[r] : r) * p.table_request + layer * p.table_layer + place] == handle)
      return true;
  return false;
}

// Prefix of a bucket in the list: cost (with fixed_cost: chunks) and stages.
struct Base {
  i64 cost;
  int stages;
};

extern "C" __global__ void __launch_bounds__(kThreads) worklist(const __grid_constant__ Params p) {
  wait_for_previous();
  release_next();
  const int layer = p.layer + blockIdx.x, head_caches = p.rows * p.kv_heads;
  const int per_thread = ceil_div(head_caches * p.tiers, kThreads);
  const int per_part = ceil_div(head_caches, gridDim.y), part_first = blockIdx.y * per_part;
  const int part_end = min(part_first + per_part, head_caches);
  Stage* stages = p.stages + static_cast<i64>(blockIdx.x) * p.capacity;
  Chunk* parts = p.parts + static_cast<i64>(blockIdx.x) * p.most;
  Slots* slots = p.slots + static_cast<i64>(blockIdx.x) * p.tiers * head_caches;
  extern __shared__ Base bases[];  // [tiers, the part's head caches]

  // Buckets in list order; each thread takes consecutive ones. The first pass adds up those of a thread, the second
  // writes where each begins.
  const Divider by_head_caches(head_caches), by_kv_heads(p.kv_heads);
  Sums base = {0, 0, 0}, total;
  bool few = false;
  const int first = threadIdx.x * per_thread, end = min(first + per_thread, head_caches * p.tiers);
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
    for (int bucket = first; bucket < end; bucket++) {
      int head_cache, head;
      const int tier = by_head_caches(bucket, head_cache), row = by_kv_heads(head_cache, head);
      if (pass && head_cache >= part_first && head_cache < part_end)
        bases[tier * per_part + head_cache - part_first] = {few || p.fixed_cost ? base.other : base.cost, base.stages};
      base.add(measure(p, counts_of(p, layer, row, head), tier));
    }
    if (!pass) {
      base = scan(base, total);
      few = !p.fixed_cost && total.stages <= p.few;
    }
  }
  __syncthreads();

  const int* costs = few ? p.few_cost : p.cost;
  const int begin_cost = few ? p.few_begin : p.begin_cost;
  const i64 all = few ? total.other : total.cost;
  i64 largest = 1;
#pragma unroll 1
  for (int t = 0; t < p.tiers; t++) largest = max(largest, static_cast<i64>(costs[t]));
  // One stage per chunk if there are that few; else at least two, since some chunks would get two anyway.
  const i64 share = ceil_div(all, static_cast<i64>(p.most));
  const i64 size = p.fixed_cost ? p.fixed_cost : share <= largest ? largest : max(2 * largest, share);
  const int used = p.fixed_cost ? total.other : ceil_div(all, size);
  // Adjacent chunks go to one multiprocessor, equally many to each: index of a chunk by its number, and the inverse.
  const int each = ceil_div(used, p.multiprocessors);
  const bool spread = !p.fixed_cost && each < p.workers;
  const Divider by_each(each), by_workers(p.workers), by_units(p.units);
  const auto place_of = [&](int chunk) {
    int in_turn;
    const int turn = by_each(chunk, in_turn);
    return spread ? turn * p.workers + in_turn : chunk;
  };
  if (blockIdx.y == 0) {
#pragma unroll 1
    for (int index = threadIdx.x; index < p.most; index += kThreads) {
      int in_turn;
      const int turn = by_workers(index, in_turn), chunk = spread ? turn * each + in_turn : index;
      if (chunk >= used || (spread && in_turn >= each)) parts[index].begin = parts[index].end = 0;
    }
    if (used && threadIdx.x == 0) parts[place_of(used - 1)].end = total.stages;
  }

  const int lane = threadIdx.x & 31;
#pragma unroll 1
  for (int u = part_first + (threadIdx.x >> 5); u < part_end; u += kThreads / 32) {
    int head;
    const int row = by_kv_heads(u, head), request = p.requests ? p.requests[row] : row;
    const int* count = counts_of(p, layer, row, head);
    const i64 lists = p.page_bytes ? 0 : static_cast<i64>(head) * p.tiers * p.max_pages;
    const int* table = p.table + request * p.table_request + layer * p.table_layer + lists;
    const bool shares = p.weights && p.state[1] && p.weights[layer * (p.rows + 1) + row];
#pragma unroll 1
    for (int t = 0; t < p.tiers; t++) {
      const Base before = bases[t * per_part + u - part_first];
      const int first_stage = before.stages, chunk = p.fixed_cost ? before.cost : 0;
      const i64 begin = p.fixed_cost ? 0 : before.cost;
      const int tokens = held(p, count, t), step = p.stage_tokens[t], n = ceil_div(tokens, step), price = costs[t];
      const Divider by_page(p.page_tokens / step);  // stages of a page
      const auto place_of_page = [&](int i, int& part) { return static_cast<i64>(t) * p.max_pages + by_page(i, part); };
      const auto stage_of = [&](int i, int part, int handle) {
        Stage stage;
        if (p.page_bytes) {
          stage.page = p.plain + handle * p.page_bytes + head * p.head_bytes + part * step * p.row_bytes;
        } else {
          int unit;
          const int slab = by_units(handle, unit);
          stage.page = p.slabs[slab] + static_cast<unsigned long long>(unit) * kUnitBytes;
        }
        stage.bucket = t * head_caches + u;
        stage.meta = meta_of(min(tokens - i * step, step), t, p.page_bytes ? i : part);
        return stage;
      };
#pragma unroll 1
      for (int i = lane; i < n; i += 32 * kAhead) {
        int handle[kAhead], part[kAhead];
        Stage stage[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; j++) handle[j] = table[place_of_page(min(i + 32 * j, n - 1), part[j])];
#pragma unroll
        for (int j = 0; j < kAhead; j++) stage[j] = stage_of(i + 32 * j, part[j], handle[j]);
#pragma unroll
        for (int j = 0; j < kAhead; j++)
          if (i + 32 * j < n) stages[first_stage + i + 32 * j] = stage[j];
      }
      const auto has_owner = [&](i64 place, int handle) { return spoken_for(p, layer, row, lists + place, handle); };
      int part;  // of its page
      if (shares) {
#pragma unroll 1
        for (int i = lane; i < n; i += 32) {
          const i64 place = place_of_page(i, part);
          if (has_owner(place, table[place])) stages[first_stage + i].meta |= kSpokenFor;
        }
      }
      // A chunk begins with the stage in which its share of the cost begins. No stage alone costs more than a share; the
      // first of a bucket, with the cost of starting it, may, and then the chunks before it are empty.
      const i64 after = n ? begin + begin_cost : begin, whole = after + static_cast<i64>(n) * price;
#pragma unroll 1
      for (i64 c = ceil_div(begin, size) + lane; c * size < whole; c += 32) {
        const int i = quotient(max(c * size - after, 0ll), price), number = chunk + c;
        Chunk& of = parts[place_of(number)];
        const i64 place = place_of_page(i, part);
        const int handle = table[place];
        Stage stage = stage_of(i, part, handle);
        if (shares && has_owner(place, handle)) stage.meta |= kSpokenFor;
        of.first = stage;
        of.begin = first_stage + i;
        of.number = number;
        if (number) parts[place_of(number - 1)].end = first_stage + i;
      }
      if (lane == 0) {
        Slots found = {0, 0};
        if (n) {
          const int c = quotient(after + price - 1, size);
          found.first = chunk + c + t * head_caches + u;
          found.count = static_cast<int>(quotient(whole - 1, size)) - c + 1;
        }
        slots[t * head_caches + u] = found;
      }
    }
  }
}
