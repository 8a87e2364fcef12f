// From counts and page tables to the work list of decode.cu, for every layer, on the device. Plain pages of rows, as
// store_kv writes them, are a cache of one tier.
//
// A block sees a layer. Its threads sum up the stages and costs of all groups (a scan over the block), which says how much
// a worker gets; then its warps write the stages of the block's own part of the heads. Blocks of one layer do the same
// scan and differ in their part only.
#include "pdl.cuh"
#include "work.cuh"

using i64 = long long;
constexpr int kThreads = 1024, kMaxTiers = 8;

struct Params {
  const int* requests;           // [rows] row of table and count, or null: row i is request i
  const int* table;              // [requests, layers, kv heads, tiers, max pages]: handles
  const int* count;              // [requests, layers, kv heads, tiers]
  const unsigned long long* slabs;
  Stage* stages;                 // [layers, capacity]
  Chunk* parts;                  // [layers, chunks]
  Slots* slots;                  // [layers, tiers, rows * kv heads]
  i64 table_request, table_layer, count_request, count_layer;  // strides, in ints
  unsigned long long plain;      // plain pages of one layer (page_bytes > 0): K of page 0; the table is [requests, pages]
  i64 page_bytes, head_bytes, row_bytes;
  int layer, rows, kv_heads, tiers, max_pages, units, capacity;
  int most;                      // chunks that there is room for; without fixed_cost, those to make
  int fixed_cost;                // 0, or what a chunk takes of one group, whatever else is there
  int begin_cost;                // of a group, beside its stages; 0 with fixed_cost
  int few, few_begin;            // with so few stages in all the costs are those in few_cost
  int multiprocessors, workers;  // warps that are on one of them at a time
  int page_tokens, stage_tokens[kMaxTiers], cost[kMaxTiers], few_cost[kMaxTiers];
};

__device__ __forceinline__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Exclusive sums over the block; `total` of all.
__device__ __forceinline__ int3 scan(int3 mine, int3& total) {
  __shared__ int3 sums[kThreads / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int3 x = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int a = __shfl_up_sync(~0u, x.x, d), b = __shfl_up_sync(~0u, x.y, d), c = __shfl_up_sync(~0u, x.z, d);
    if (lane >= d) x.x += a, x.y += b, x.z += c;
  }
  if (lane == 31) sums[warp] = x;
  __syncthreads();
  if (warp == 0) {
    int3 s = sums[lane];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int a = __shfl_up_sync(~0u, s.x, d), b = __shfl_up_sync(~0u, s.y, d), c = __shfl_up_sync(~0u, s.z, d);
      if (lane >= d) s.x += a, s.y += b, s.z += c;
    }
    sums[lane] = s;
  }
  __syncthreads();
  total = sums[kThreads / 32 - 1];
  const int3 before = warp ? sums[warp - 1] : make_int3(0, 0, 0);
  return make_int3(before.x + x.x - mine.x, before.y + x.y - mine.y, before.z + x.z - mine.z);
}

// Tokens of a tier: what is counted, but no more than the table has pages for.
__device__ __forceinline__ int held(const Params& p, const int* count, int tier) {
  return min(max(count[tier], 0), p.max_pages * p.page_tokens);
}

// Stages, cost, and chunks (with fixed_cost) or cost where there are few, of one tier of a KV head.
__device__ __forceinline__ int3 measure(const Params& p, const int* count, int tier) {
  const int stages = ceil_div(held(p, count, tier), p.stage_tokens[tier]);
  const int cost = stages ? p.begin_cost + stages * p.cost[tier] : 0;
  const int few = stages ? p.few_begin + stages * p.few_cost[tier] : 0;
  return make_int3(stages, cost, p.fixed_cost ? ceil_div(cost, p.fixed_cost) : few);
}

__device__ __forceinline__ const int* counts_of(const Params& p, int layer, int unit) {
  const int row = unit / p.kv_heads, request = p.requests ? p.requests[row] : row;
  const int head = p.page_bytes ? 0 : unit % p.kv_heads;  // plain pages: one length for all heads
  return p.count + request * p.count_request + layer * p.count_layer + head * p.tiers;
}

extern "C" __global__ void __launch_bounds__(kThreads) worklist(const __grid_constant__ Params p) {
  wait_for_previous();
  release_next();
  const int layer = p.layer + blockIdx.x, units = p.rows * p.kv_heads, per_thread = ceil_div(units * p.tiers, kThreads);
  const int per_part = ceil_div(units, gridDim.y), part_first = blockIdx.y * per_part;
  const int part_end = min(part_first + per_part, units);
  Stage* stages = p.stages + static_cast<i64>(blockIdx.x) * p.capacity;
  Chunk* parts = p.parts + static_cast<i64>(blockIdx.x) * p.most;
  Slots* slots = p.slots + static_cast<i64>(blockIdx.x) * p.tiers * units;
  extern __shared__ int3 bases[];  // [tiers, the part's units]

  // Groups in the order of the list, some in a row for every thread.
  int3 mine = make_int3(0, 0, 0), total;
  const int first = threadIdx.x * per_thread, end = min(first + per_thread, units * p.tiers);
  const auto group_of = [&](int group) { return measure(p, counts_of(p, layer, group % units), group / units); };
  for (int group = first; group < end; group++) {
    const int3 n = group_of(group);
    mine.x += n.x, mine.y += n.y, mine.z += n.z;
  }
  int3 base = scan(mine, total);
  for (int group = first; group < end; group++) {
    const int unit = group % units;
    if (unit >= part_first && unit < part_end) bases[group / units * per_part + unit - part_first] = base;
    const int3 n = group_of(group);
    base.x += n.x, base.y += n.y, base.z += n.z;
  }
  __syncthreads();

  const bool few = !p.fixed_cost && total.x <= p.few;
  const int* costs = few ? p.few_cost : p.cost;
  const int begin_cost = few ? p.few_begin : p.begin_cost, all = few ? total.z : total.y;
  int largest = 1;
  for (int t = 0; t < p.tiers; t++) largest = max(largest, costs[t]);
  // A stage each where there are so few; else two at least, since some would get two anyway.
  const int share = ceil_div(all, p.most);
  const int size = p.fixed_cost ? p.fixed_cost : share <= largest ? largest : max(2 * largest, share);
  const int used = p.fixed_cost ? total.z : ceil_div(all, size);
  // Neighbours go to one multiprocessor, and as many to each: the place of a chunk by its number, and the other way round.
  const int each = ceil_div(used, p.multiprocessors);
  const bool spread = !p.fixed_cost && each < p.workers;
  const auto place_of = [&](int chunk) { return spread ? chunk / each * p.workers + chunk % each : chunk; };
  if (blockIdx.y == 0) {
    for (int at = threadIdx.x; at < p.most; at += kThreads) {
      const int in_turn = at % p.workers, chunk = spread ? at / p.workers * each + in_turn : at;
      if (chunk >= used || (spread && in_turn >= each)) parts[at].at = parts[at].end = 0;
    }
    if (used && threadIdx.x == 0) parts[place_of(used - 1)].end = total.x;
  }

  const int lane = threadIdx.x & 31;
  for (int u = part_first + (threadIdx.x >> 5); u < part_end; u += kThreads / 32) {
    const int* count = counts_of(p, layer, u);
    const int row = u / p.kv_heads, request = p.requests ? p.requests[row] : row;
    const int head = u % p.kv_heads;
    const int* table = p.table + request * p.table_request + layer * p.table_layer +
                       (p.page_bytes ? 0 : static_cast<i64>(head) * p.tiers * p.max_pages);
    for (int t = 0; t < p.tiers; t++) {
      const int3 before = bases[t * per_part + u - part_first];
      const int at = before.x, chunk = p.fixed_cost ? before.z : 0, begin = p.fixed_cost ? 0 : few ? before.z : before.y;
      const int tokens = held(p, count, t), step = p.stage_tokens[t], n = ceil_div(tokens, step), price = costs[t];
      const int per_page = p.page_tokens / step;
      const auto stage_of = [&](int i) {
        const int handle = table[static_cast<i64>(t) * p.max_pages + i / per_page], part = i % per_page;
        Stage stage;
        if (p.page_bytes) stage.page = p.plain + handle * p.page_bytes + head * p.head_bytes + part * step * p.row_bytes;
        else stage.page = p.slabs[handle / p.units] + static_cast<unsigned long long>(handle % p.units) * 64;
        stage.group = t * units + u;
        stage.meta = meta_of(min(tokens - i * step, step), t, p.page_bytes ? i : part);
        return stage;
      };
      for (int i = lane; i < n; i += 32) stages[at + i] = stage_of(i);
      // A chunk begins with the stage that its share of the cost begins in. No stage costs more than a share; with the cost
      // of beginning its group a first one may, and then chunks before its own are empty.
      const int after = n ? begin + begin_cost : begin;
      const i64 whole = after + static_cast<i64>(n) * price;
      for (int c = ceil_div(begin, size) + lane; static_cast<i64>(c) * size < whole; c += 32) {
        const int i = max(c * size - after, 0) / price, number = chunk + c;
        Chunk& part = parts[place_of(number)];
        part.first = stage_of(i);
        part.at = at + i;
        part.number = number;
        if (number) parts[place_of(number - 1)].end = at + i;
      }
      if (lane == 0) {
        Slots found = {0, 0};
        if (n) {
          const int c = (after + price - 1) / size;
          found.first = chunk + c + t * units + u;
          found.count = (after + n * price - 1) / size - c + 1;
        }
        slots[t * units + u] = found;
      }
    }
  }
}
