// Computes moves from targets, one block per head cache: tokens that leave, fill a hole or arrive, and their slots; as moves.py.
//
//   find    the first token of each bucket in the list
//   count   three numbers per bucket, after which the host allocates pages
//   clear   zeroes new plain pages, whose slots past the end are read with a weight of 0
//   enter   adds new pages to the page table
//   place   computes the moves, at offsets from the host: the i-th filler takes the i-th hole, arrivals follow the kept tokens
//   leave   after the moves: removes old pages from the page table, and sets the new counts
//
// A warp processes a run of a tier's tokens, 128 at a time. Ballots show which of them leave, fill or arrive in a tier; lane c
// counts the tokens of class c so far. A first pass over the targets gives the sums at which each warp begins.
#include "coded.cuh"

constexpr int kHole = kMaxTiers, kFiller = kMaxTiers + 1, kClasses = kMaxTiers + 2, kAhead = 4;

struct Tier {
  int position_offset, importance_offset;
};

struct Params {
  const signed char* target;  // [n] tier, negative: evicted
  const i64* head_cache;      // [n], as the columns of Tokens; for new tokens, and for find
  const i64* tier;
  const i64* slot;
  const i64* position;
  const float* importance;
  const i64* order;      // [new] new tokens, by head cache
  const i64* new_first;  // [head_caches + 1] of order
  const int* fresh;      // [4, places] instead of both: new tokens, which follow the others of a head cache; first row,
                         // first position, importance unless `mass` has it
  const float* mass;     // [rows, heads]
  i64* starts;           // [buckets] the first token
  int* numbers;          // [3, buckets]: left, came, holes
  const int* first;      // [3, buckets]: first filler, first arrival; of whole pages: number less index in the bucket
  const int* places;     // [places] index of (request, layer) in the tables; negative: not moved
  int* count;            // [places of all, heads, tiers] tokens
  int* table;            // [places of all, heads, tiers, max_pages] handles of pages
  const i64* entries;    // [entered + left, 2] index in the table, handle: pages that are added, then pages that are removed;
                         // then the handles of new plain pages
  const i64* pointers;  // [slabs]
  const char* k;        // new rows
  const char* v;
  int4* copies;  // fillers: handle and slot, from and to
  int* packed;   // arrivals [n, 12], columns as in moves.COLUMNS
  i64* k_at;     // [whole pages, page_tokens] addresses of rows, or codes (coded.cuh)
  i64* v_at;     // same for V; null without new rows, since V is at a constant offset from K in every page
  int2* sides;   // [whole pages, page_tokens] position and importance
  i64* pages;    // [whole pages] addresses in units
  int2* owners;  // [whole pages] handle and tier
  int* head_caches;     // [whole pages]
  i64 n, k_row, v_row;  // strides in bytes
  int entered, left;    // entries
  int stride;           // bytes of a plain page
  int buckets, heads, tiers, page_tokens, max_pages, units, row_bytes, v_offset;
  Tier tier_of[kMaxTiers];
};

template <class = void>
__global__ void __launch_bounds__(256) find(const __grid_constant__ Params p) {
  const i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (i < p.n && p.slot[i] == 0 && p.tier[i] >= 0) p.starts[p.head_cache[i] * p.tiers + p.tier[i]] = i;
}

// Tokens of a bucket, from the table of counts.
__device__ __forceinline__ int* count_of(const Params& p, int head_cache) {
  return p.count + (static_cast<i64>(p.places[head_cache / p.heads]) * p.heads + head_cache % p.heads) * p.tiers;
}

template <class = void>
__global__ void __launch_bounds__(256) clear(const __grid_constant__ Params p) {
  const i64 handle = p.entries[2ll * (p.entered + p.left) + blockIdx.x];
  int4* page = reinterpret_cast<int4*>(page_address(p.pointers, p.units, static_cast<int>(handle)));
  for (int i = threadIdx.x; i < p.stride / 16; i += 256) page[i] = make_int4(0, 0, 0, 0);
}

template <class = void>
__global__ void __launch_bounds__(256) enter(const __grid_constant__ Params p) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < p.entered) p.table[p.entries[2 * i]] = static_cast<int>(p.entries[2 * i + 1]);
}

template <class = void>
__global__ void __launch_bounds__(256) leave(const __grid_constant__ Params p) {
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i < p.left) p.table[p.entries[2 * (p.entered + i)]] = -1;
  if (i < p.buckets && p.places[i / (p.heads * p.tiers)] >= 0)
    count_of(p, i / p.tiers)[i % p.tiers] += p.numbers[p.buckets + i] - p.numbers[i];
}

// The tokens of a bucket; for tier == tiers the new tokens of the head cache.
struct Run {
  const signed char* target;
  const i64* order;
  int n, stay;  // the target that means: nothing to do

  __device__ __forceinline__ Run(const Params& p, int head_cache, int tier) {
    const int bucket = head_cache * p.tiers + tier, *counts = count_of(p, head_cache);
    if (tier < p.tiers) {
      n = counts[tier];
      target = n ? p.target + p.starts[bucket] : nullptr;
      order = nullptr;
      stay = tier;
    } else {
      const i64 begin = p.order ? p.new_first[head_cache] : 0;
      n = p.order ? static_cast<int>(p.new_first[head_cache + 1] - begin) : 0;
      target = p.target;
      order = p.order ? p.order + begin : nullptr;
      stay = -1;
      if (p.fresh) {
        n = p.fresh[head_cache / p.heads];
        target = p.target + p.starts[bucket - 1] + counts[tier - 1];
      }
    }
  }
  __device__ __forceinline__ int operator[](int i) const { return order ? target[order[i]] : target[i]; }
};

// A new token: its row, position, and importance as bits.
struct NewToken {
  int row, position, importance;

  __device__ __forceinline__ NewToken(const Params& p, const Run& run, int head_cache, int i) {
    if (p.fresh) {
      const int places = p.buckets / (p.heads * p.tiers), *line = p.fresh + head_cache / p.heads;
      row = (line[places] + i) * p.heads + head_cache % p.heads;
      position = line[2 * places] + i;
      importance = p.mass ? __float_as_int(p.mass[row]) : line[3 * places];
    } else {
      const i64 token = run.order[i];
      row = static_cast<int>(p.slot[token]);
      position = static_cast<int>(p.position[token]);
      importance = __float_as_int(p.importance[token]);
    }
  }
};

// Threads of a block; in a large one they are read at run time.
template <int kThreads> __device__ __forceinline__ unsigned block_threads() { return kThreads < 1024 ? kThreads : blockDim.x; }

template <int kThreads>
__global__ void __launch_bounds__(kThreads) count(const __grid_constant__ Params p) {
  __shared__ int sums[3][kMaxTiers];
  const int head_cache = blockIdx.x, threads = block_threads<kThreads>();
  if (threadIdx.x < 3 * kMaxTiers) sums[threadIdx.x / kMaxTiers][threadIdx.x % kMaxTiers] = 0;
  __syncthreads();
  for (int tier = 0; tier <= p.tiers; tier++) {
    const Run run(p, head_cache, tier);
    for (int i = threadIdx.x; i < run.n; i += threads * kAhead) {
      int target[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; j++) target[j] = i + threads * j < run.n ? run[i + threads * j] : run.stay;
#pragma unroll
      for (int j = 0; j < kAhead; j++) {
        if (target[j] == run.stay) continue;
        if (tier < p.tiers) atomicAdd(&sums[0][tier], 1);
        if (target[j] >= 0) atomicAdd(&sums[1][target[j]], 1);
      }
    }
  }
  __syncthreads();
  for (int tier = 0; tier < p.tiers; tier++) {  // past the new end, tokens that stay fill holes before it
    const Run run(p, head_cache, tier);
    int fillers = 0;
    for (int i = run.n - sums[0][tier] + threadIdx.x; i < run.n; i += threads) fillers += run[i] == run.stay;
    if (fillers) atomicAdd(&sums[2][tier], fillers);
  }
  __syncthreads();
  const int which = threadIdx.x / kMaxTiers, tier = threadIdx.x % kMaxTiers;
  if (which < 3 && tier < p.tiers)
    p.numbers[which * static_cast<i64>(p.buckets) + head_cache * p.tiers + tier] = sums[which][tier];
}

__device__ __forceinline__ unsigned below() { return (1u << (threadIdx.x & 31)) - 1; }

template <class Position, bool kKeeps>
__device__ __forceinline__ int2 side_of(const Params& p, const char* page, int tier, int row) {
  const Tier& offsets = p.tier_of[tier];
  const int position = reinterpret_cast<const Position*>(page + offsets.position_offset)[row];
  return make_int2(position, kKeeps ? reinterpret_cast<const int*>(page + offsets.importance_offset)[row] : 0);
}

// Classes of the tokens of one step of a warp: lane c of the result is the number of tokens of class c.
template <class F>
__device__ __forceinline__ int classes(int target, bool arrives, bool hole, bool filler, F each) {
  const int lane = threadIdx.x & 31;
  const unsigned holes = __ballot_sync(~0u, hole), fillers = __ballot_sync(~0u, filler);
  int number = lane == kHole ? __popc(holes) : lane == kFiller ? __popc(fillers) : 0;
  each(hole, kHole, __popc(holes & below()));
  each(filler, kFiller, __popc(fillers & below()));
  for (unsigned rest = __ballot_sync(~0u, arrives); rest;) {
    const int to = __shfl_sync(~0u, target, __ffs(rest) - 1);
    const unsigned same = __ballot_sync(~0u, arrives && target == to);
    if (lane == to) number = __popc(same);
    each(arrives && target == to, to, __popc(same & below()));
    rest &= ~same;
  }
  return number;
}

// Processes tokens from .. to - 1 of a run; holes are before `end`, which is -1 for new ones, and fillers after.
template <class F>
__device__ __forceinline__ void each_step(const Run& run, int from, int to, int end, F use) {
  const int lane = threadIdx.x & 31;
  for (int i = from; i < to; i += 32 * kAhead) {
    unsigned bytes = 0;
#pragma unroll
    for (int j = 0; j < kAhead; j++) {
      const int token = i + 32 * j + lane;
      bytes |= ((token < to ? run[token] : run.stay) & 0xffu) << 8 * j;
    }
#pragma unroll 1
    for (int j = 0; j < kAhead; j++) {
      const int token = i + 32 * j + lane, target = static_cast<signed char>(bytes >> 8 * j);
      const bool moves = target != run.stay, filler = !moves && end >= 0 && token >= end && token < to;
      if (__any_sync(~0u, moves || filler)) use(token, target, moves && target >= 0, moves && token < end, filler);
    }
  }
}

template <class Position, bool kKeeps, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads < 1024 ? 4 : 0) place(const __grid_constant__ Params p) {
  __shared__ int begin[kThreads / 32][kClasses];
  __shared__ int came_before[kMaxTiers];
  __shared__ int kept[kMaxTiers], edge[kMaxTiers];  // tokens; the first slot of whole pages
  const int head_cache = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, size = p.page_tokens;
  const unsigned threads = block_threads<kThreads>();
  const int warps = threads >> 5;
  const i64 first_bucket = static_cast<i64>(head_cache) * p.tiers;
  const i64 place = p.places[head_cache / p.heads];
  if (place < 0) return;
  const i64 lists = (place * p.heads + head_cache % p.heads) * p.tiers * p.max_pages;
  if (threadIdx.x < p.tiers) {
    const int t = threadIdx.x;
    const int* numbers = p.numbers + first_bucket + t;
    kept[t] = count_of(p, head_cache)[t] - numbers[0];
    edge[t] = t ? (kept[t] + size - 1) / size * size : 0x7fffffff;  // plain pages are never written whole
    came_before[t] = 0;
  }
  __syncthreads();
  for (int t = 1; t < p.tiers; t++) {  // whole pages, and their slots past the end
    const int end = kept[t] + p.numbers[p.buckets + first_bucket + t], begun = edge[t] / size;
    const i64 first = p.first[2 * static_cast<i64>(p.buckets) + first_bucket + t];
    for (int page = begun + threadIdx.x; page * size < end; page += threads) {
      const int handle = p.table[lists + t * p.max_pages + page];
      p.pages[first + page] = reinterpret_cast<i64>(page_address(p.pointers, p.units, handle)) / 64;
      p.owners[first + page] = make_int2(handle, t);
      p.head_caches[first + page] = head_cache;
    }
    const i64 slot = static_cast<i64>(end) + threadIdx.x;
    if (end > edge[t] && slot < (end + size - 1) / size * size) {
      p.k_at[first * size + slot] = -1;
      if (p.v_at) p.v_at[first * size + slot] = -1;
      p.sides[first * size + slot] = make_int2(-1, -1);
    }
  }
  for (int tier = 0; tier <= p.tiers; tier++) {
    const Run run(p, head_cache, tier);
    if (run.n == 0) continue;
    const bool is_new = tier == p.tiers;
    const int share = (run.n + warps * 32 - 1) / (warps * 32) * 32;
    const int from = warp * share, to = min(run.n, from + share);
    __syncthreads();  // until the previous tier's data in shared memory has been read
    const int end = is_new ? -1 : kept[tier];

    int seen = 0;
    each_step(run, from, to, end, [&](int, int target, bool arrives, bool hole, bool filler) {
      seen += classes(target, arrives, hole, filler, [](bool, int, int) {});
    });
    if (lane < kClasses) begin[warp][lane] = seen;
    __syncthreads();
    if (threadIdx.x < kClasses) {
      int sum = threadIdx.x < p.tiers ? came_before[threadIdx.x] : 0;
      for (int w = 0; w < warps; w++) {
        const int own = begin[w][threadIdx.x];
        begin[w][threadIdx.x] = sum;
        sum += own;
      }
      if (threadIdx.x < p.tiers) came_before[threadIdx.x] = sum;
    }
    __syncthreads();

    seen = lane < kClasses ? begin[warp][lane] : 0;
    each_step(run, from, to, end, [&](int slot, int target, bool arrives, bool hole, bool filler) {
      int rank = 0, of_hole = 0, of_filler = 0;
      const int before = seen;
      seen += classes(target, arrives, hole, filler, [&](bool is, int which, int number) {
        const int sum = number + __shfl_sync(~0u, before, which);
        if (is) (which == kHole ? of_hole : which == kFiller ? of_filler : rank) = sum;
      });
      const int row = slot % size, column = slot / size;
      if (hole) {
        const int handle = p.table[lists + tier * p.max_pages + column];
        reinterpret_cast<int2*>(p.copies + p.first[first_bucket + tier] + of_hole)[1] = make_int2(handle, row);
      }
      if (!arrives && !filler) return;
      int handle = 0, source_row = row;
      const char* page = nullptr;
      int2 side = make_int2(0, 0);
      if (is_new) {
        const NewToken token(p, run, head_cache, slot);
        source_row = token.row;
        side = make_int2(token.position, kKeeps ? token.importance : 0);
      } else {
        handle = p.table[lists + tier * p.max_pages + column];
      }
      if (filler) {
        reinterpret_cast<int2*>(p.copies + p.first[first_bucket + tier] + of_filler)[0] = make_int2(handle, row);
        return;
      }
      if (!is_new) {
        page = page_address(p.pointers, p.units, handle);
        side = side_of<Position, kKeeps>(p, page, tier, row);
      }
      const int to_slot = kept[target] + rank, whole = max(edge[target] - kept[target], 0);
      if (rank >= whole) {
        const i64 number = p.first[2 * static_cast<i64>(p.buckets) + first_bucket + target] + to_slot / size;
        const i64 index = number * size + to_slot % size;
        i64 k = reinterpret_cast<i64>(is_new ? p.k + source_row * p.k_row : page + row * p.row_bytes), v = k + p.v_offset;
        if (is_new) v = reinterpret_cast<i64>(p.v + source_row * p.v_row);
        else if (tier) k = v = coded_row(tier, page, row);
        p.k_at[index] = k;
        if (p.v_at) p.v_at[index] = v;
        p.sides[index] = side;
        return;
      }
      const i64 index = p.first[static_cast<i64>(p.buckets) + first_bucket + target] + rank;
      int4* line = reinterpret_cast<int4*>(p.packed + index * 12);
      const int there = p.table[lists + target * p.max_pages + to_slot / size];
      line[0] = make_int4(handle, source_row, is_new ? -1 : tier, there);
      line[1] = make_int4(to_slot % size, target, head_cache, -1);
      line[2] = make_int4(1, side.x, side.y, 0);
    });
  }
}
