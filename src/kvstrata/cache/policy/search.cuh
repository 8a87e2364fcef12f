// The search for the lowest price that fits a head cache (choose.cu).
//
// Tokens of a tier take step s if their key is below limit s, and limits decrease from step to step. So the number of tokens
// below each limit, by tier, gives the number per target, and whether that fits. A token whose outcome is the same at both
// ends of the search is not counted again: when few others are left, they go into a list.
//
// The search is binary, and looks ahead: a pass tries the prices of several levels, the nodes of a tree. Node i has the
// children 2i + 1, tried next if its price fits, and 2i + 2. First all threads count, for two levels; with a list, each warp
// counts for a price of its own, for four levels. Then each price is decided by a warp.
#pragma once

#include "walk.cuh"

constexpr int kListed = 2048, kCells = kTiers * kTiers, kNever = kTiers;
constexpr int kNodes = kThreads / 32 - 1, kFirstNodes = 3, kUnused = -0x7fffffff - 1;
static_assert((kNodes & kNodes + 1) == 0, "a tree of whole levels");

// The search of one head cache, in shared memory.
struct Search {
  int reach[kNodes][kCells];           // [tier, step] tokens below the limit, at each price that is tried
  int limit[kNodes][kTiers];           // of each step
  int price[kNodes], fit[kNodes];      // price or kUnused; 1 if it fits
  int free_at[kNodes][kTiers], able_at[kNodes][kTiers];
  int at_low[kCells], at_high[kCells]; // `reach` at the ends of the search
  int base[kCells];                    // the part of `reach` that is not in the list
  int low_limit[kTiers], high_limit[kTiers];  // at the ends of the search when the list is made
  int moving[kTiers], staying[kTiers]; // tokens that may move, and others plus the room that is left for more
  int needs[kTiers + 1];               // steps that take a token to this tier or below, kNever for none
  int list_first[kTiers], list_size[kTiers];
  int free[kTiers], able[kTiers];      // slots to fill at the highest price that fits, tokens that may fill them
  int low, high, undecided, fitted;
  i64 share;
};

// State of a warp that decides about a price.
struct Decider {
  const Params& p;
  Search& s;
  int kind, lane;

  // Tokens of a tier that may move and whose target is x or below.
  __device__ int upto(const int* reach, int tier, int x) const {
    const int widest = max(tier, p.leave_plain);
    if (kind == kEvict) return x <= max(widest, p.ladder[p.steps]) ? s.moving[tier] - reach[tier * kTiers] : 0;
    if (x <= widest) return s.moving[tier];
    return s.needs[x] == kNever ? 0 : reach[tier * kTiers + s.needs[x] - 1];
  }
  // Decides whether the tokens fit at the price of a node when empty slots are filled, and how many are filled. Loops are not
  // unrolled, here and in choose.cu: it is no slower, and the code is smaller.
  __device__ void decide(int node) const {
    const int* reach = s.reach[node];
    const bool is_tier = lane < p.tiers;
    // Tokens of a tier whose target is the lane's.
    const auto come = [&](int tier) { return is_tier ? upto(reach, tier, lane) - upto(reach, tier, lane + 1) : 0; };
    int held = is_tier ? s.staying[lane] : 0;
#pragma unroll 1
    for (int tier = 0; tier < p.tiers; tier++) held += come(tier);
    int able = 0;  // of the lane's target: tokens of this tier and of wider ones that have not filled a slot
    int own_free = 0, own_able = 0;
#pragma unroll 1
    for (int tier = 0; p.fills && tier < p.tiers - 1; tier++) {
      able += come(tier);
      const int free = __shfl_sync(~0u, -held & (1 << p.page_shift) - 1, tier);
      const int own = lane > tier ? able : 0;
      int upto_here = own;
#pragma unroll 1
      for (int distance = 1; distance < kTiers; distance *= 2) {
        const int before = __shfl_up_sync(~0u, upto_here, distance);
        if (lane >= distance) upto_here += before;
      }
      const int all = __shfl_sync(~0u, upto_here, kTiers - 1), filled = max(min(free - (upto_here - own), own), 0);
      held += lane == tier ? min(free, all) : -filled;
      able -= filled;
      if (lane == tier) own_free = free, own_able = all;
    }
    i64 bytes = is_tier ? price_of(p, lane, held) : 0;
#pragma unroll 1
    for (int distance = 1; distance < kTiers; distance *= 2) bytes += __shfl_xor_sync(~0u, bytes, distance);
    if (lane < kTiers) s.free_at[node][lane] = own_free, s.able_at[node][lane] = own_able;
    if (lane == 0) s.fit[node] = bytes <= s.share;
  }
  // The key below which tokens take a step.
  __device__ int limit(int price, int step) const {
    if (kind == kEvict) return step == 0 ? price + 1 : 0;
    if (step >= p.steps) return 0;
    if (p.policy == kUniform) return min(max(price - (step << kAgeBits), 0), 1 << kAgeBits);
    return __float_as_int(__fdiv_rn(__int_as_float(price), p.slope[step]));
  }
  __device__ bool matters(int tier, int step) const {
    return kind == kEvict ? step == 0 : step < p.steps && p.ladder[step + 1] > max(tier, p.leave_plain);
  }
  // The price of a node, if the search gets there.
  __device__ int price_at(int node) const {
    int low = s.low, high = s.high;
    for (int bit = 30 - __clz(node + 1); bit >= 0 && high - static_cast<i64>(low) > kGap; bit--)
      (node + 1 >> bit & 1 ? low : high) = middle(low, high);
    return high - static_cast<i64>(low) > kGap ? middle(low, high) : kUnused;
  }
  __device__ static int middle(int low, int high) { return static_cast<int>((static_cast<i64>(low) + high) / 2); }
  // Sets up the warp's node for a pass.
  __device__ void begin(int node, int price, bool listed) const {
    if (lane == 0) s.price[node] = price;
    if (lane < kTiers) s.limit[node][lane] = price == kUnused ? 0 : limit(price, lane);
    for (int i = lane; i < kCells; i += 32) s.reach[node][i] = listed ? s.base[i] : 0;
  }
  // Ends a pass: one warp moves the ends of the search. The first pass tried the lower end as node 0.
  __device__ void end(bool is_first, int nodes) const {
    int low = s.low, high = s.high, fitted = -1, lowered = -1, undecided = 0;
    for (int node = 0; node < nodes && s.price[node] != kUnused;) {
      const bool fit = s.fit[node];
      (fit ? high : low) = s.price[node];
      (fit ? fitted : lowered) = node;
      node = is_first ? fit ? nodes : node + 1 : 2 * node + 2 - fit;
    }
    for (int i = lane; i < kCells; i += 32) {
      if (fitted >= 0) s.at_high[i] = s.reach[fitted][i];
      if (lowered >= 0) s.at_low[i] = s.reach[lowered][i];
      if (i / kTiers < p.tiers && matters(i / kTiers, i % kTiers)) undecided += s.at_high[i] - s.at_low[i];
    }
    undecided = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(undecided)));
    if (fitted >= 0 && lane < kTiers) s.free[lane] = s.free_at[fitted][lane], s.able[lane] = s.able_at[fitted][lane];
    if (lane == 0) {
      s.low = low;
      s.high = high;
      s.undecided = undecided;
      s.fitted |= fitted >= 0;
    }
  }
};

// Adds the tokens of a tier below each of kSteps limits, for the nodes from `node` on; all threads.
template <int kSteps, int kPrices>
__device__ __forceinline__ void count(Search& s, int node, const int* key, Span one, Span two, int tier, int steps) {
  int limit[kPrices][kSteps], below[kPrices][kSteps];
#pragma unroll
  for (int i = 0; i < kPrices; i++)
#pragma unroll
    for (int step = 0; step < kSteps; step++) limit[i][step] = s.limit[node + i][step], below[i][step] = 0;
  each<false>(one, two, [&](int i) {
    const int own = key[i];
#pragma unroll
    for (int j = 0; j < kPrices; j++)
#pragma unroll
      for (int step = 0; step < kSteps; step++)
        below[j][step] += static_cast<unsigned>(own - limit[j][step]) >> 31;  // own < limit
  });
#pragma unroll
  for (int i = 0; i < kPrices; i++)
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      if (step >= steps) break;
      const int sum = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(below[i][step])));
      if ((threadIdx.x & 31) == 0 && sum) atomicAdd(&s.reach[node + i][tier * kTiers + step], sum);
    }
}

// Adds the tokens of a tier in the list below each of kSteps limits of a node; one warp.
template <int kSteps>
__device__ __forceinline__ void count_listed(Search& s, int node, const int* list, int tier, int steps) {
  int limit[kSteps], below[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; step++) limit[step] = s.limit[node][step], below[step] = 0;
  const int first = s.list_first[tier], end = first + s.list_size[tier], lane = threadIdx.x & 31;
#pragma unroll 4
  for (int i = first + lane; i < end; i += 32) {
    const int own = list[i];
#pragma unroll
    for (int step = 0; step < kSteps; step++) below[step] += static_cast<unsigned>(own - limit[step]) >> 31;
  }
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    if (step >= steps) break;
    const int sum = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(below[step])));
    if (lane == 0) s.reach[node][tier * kTiers + step] += sum;
  }
}

// Puts the undecided tokens of a tier into the list, and removes those below the lower limits from the base.
template <int kSteps>
__device__ __forceinline__ void collect(const Decider& decider, const int* key, Span one, Span two, int tier, int* list) {
  Search& s = decider.s;
  int low[kSteps], removed[kSteps];
  unsigned wide[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    low[step] = s.low_limit[step];
    wide[step] = decider.matters(tier, step) ? s.high_limit[step] - low[step] : 0;
    removed[step] = 0;
  }
  each<true>(one, two, [&](int i) {
    const int own = i < 0 ? kFixed : key[i];
    bool undecided = false;
#pragma unroll
    for (int step = 0; step < kSteps; step++) undecided |= static_cast<unsigned>(own - low[step]) < wide[step];
    append(list + s.list_first[tier], &s.list_size[tier], undecided, own);
#pragma unroll
    for (int step = 0; step < kSteps; step++) removed[step] += undecided && own < low[step];
  });
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    const int sum = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(removed[step])));
    if (decider.lane == 0 && sum) atomicAdd(&s.base[tier * kTiers + step], -sum);
  }
}
