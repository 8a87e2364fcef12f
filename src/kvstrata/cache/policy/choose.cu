// The last step of the planner (plan.cu), one block per head cache: the lowest price that fits, targets, and filled slots.
#include "search.cuh"

constexpr int kRanked = 256;  // tokens that may fill slots, up to which they are ranked

// Writes the targets of a tier's tokens.
template <int kSteps>
__device__ __forceinline__ void assign(const Decider& decider, const int* key, Span one, Span two, int tier,
                                       signed char* target) {
  const Params& p = decider.p;
  const bool evicts = decider.kind == kEvict;
  const int widest = max(tier, p.leave_plain), stays = evicts ? max(widest, p.ladder[p.steps]) : widest;
  int limit[kSteps], after[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; step++) {
    limit[step] = decider.s.limit[0][step];
    after[step] = evicts ? kDrop : max(widest, p.ladder[step + 1]);
  }
  each<false>(one, two, [&](int i) {
    const int own = key[i];
    int to = own == kFixed ? tier : stays;
#pragma unroll
    for (int step = 0; step < kSteps; step++) to = own < limit[step] ? after[step] : to;
    target[i] = to;
  });
}

template <class Position, bool kKeeps, bool kNear>
__global__ void __launch_bounds__(kThreads, 2) choose(const __grid_constant__ Params p) {
  extern __shared__ int nearby[];
  __shared__ Search s;
  __shared__ int list[kListed];
  __shared__ int bounds[2], ends[kTiers + 1], cells[3], size[2];
  static_assert(3 * kRanked <= kNodes * kCells, "memory of the search is used again");
  int *const ranked = s.reach[0], *const ranked_key = ranked + kRanked, *const ranked_position = ranked_key + kRanked;
  const int head_cache = blockIdx.x, place = head_cache / p.heads, tiers = p.tiers, lowest = p.ladder[p.steps];
  const Head<Position, kKeeps> head(p, place, head_cache % p.heads);
  int scope = 0;
  for (int from = 0, to = p.scopes_; from < to;) {
    scope = (from + to) / 2;
    if (p.scopes[scope + 1] <= place) from = scope + 1;
    else if (p.scopes[scope] > place) to = scope;
    else break;
  }
  const int kind = p.kind[2 * scope];
  const i64 begin = p.begin[head_cache];
  const int* line = p.survey + static_cast<i64>(head_cache) * 2 * tiers;
  signed char* target = p.target + begin;
  if (threadIdx.x == 0) {
    int end = 0;
    for (int tier = 0; tier <= tiers; tier++) ends[tier] = end += head.size(tier);
  }
  if (threadIdx.x < 2) bounds[threadIdx.x] = threadIdx.x ? 0 : kFixed;
  if (threadIdx.x < kCells) {
    const int tier = threadIdx.x / kTiers, many = tier < tiers ? line[tiers + tier] : 0;
    s.at_low[threadIdx.x] = 0;
    s.at_high[threadIdx.x] = many;
    if (threadIdx.x % kTiers == 0) {
      s.moving[tier] = many;
      s.staying[tier] = tier < tiers ? line[tier] + (tier == 0 ? p.kind[2 * scope + 1] : 0) : 0;
    }
  }
  if (threadIdx.x <= kTiers) {
    int needs = kNever;
#pragma unroll 1
    for (int step = p.steps; step > 0; step--)
      if (p.ladder[step] >= static_cast<int>(threadIdx.x)) needs = step;
    s.needs[threadIdx.x] = needs;
  }
  if (threadIdx.x == 0) s.share = p.share[head_cache];
  Tally tally(cells);
  const int n = ends[tiers];
  // The tokens of a tier; new ones are plain.
  const auto one = [&](int tier) { return Span{tier ? ends[tier - 1] : 0, ends[tier]}; };
  const auto two = [&](int tier) { return Span{ends[tiers - 1], tier ? ends[tiers - 1] : n}; };
  int* const far = p.key + begin;
  int* const key = kNear ? nearby : far;
  bool chooses = kind == kChoose || kind == kEvict;
  if (chooses) {
    int least = kFixed, most = 0;
#pragma unroll 8
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const int own = far[i];
      if (kNear) nearby[i] = own;
      least = min(least, own);
      most = max(most, own == kFixed ? 0 : own);
    }
    least = static_cast<int>(__reduce_min_sync(~0u, static_cast<unsigned>(least)));  // keys are at least 0
    most = static_cast<int>(__reduce_max_sync(~0u, static_cast<unsigned>(most)));
    if ((threadIdx.x & 31) == 0) {
      atomicMin(&bounds[0], least);
      atomicMax(&bounds[1], most);
    }
    __syncthreads();
    chooses = bounds[0] != kFixed;
  }
  if (!chooses) {
#pragma unroll 1
    for (int tier = 0; tier < tiers; tier++) each<false>(one(tier), two(tier), [&](int i) { target[i] = tier; });
    return;
  }
  const Decider decider{p, s, kind, static_cast<int>(threadIdx.x & 31)};
  const int warp = threadIdx.x / 32;
  // True if a count needs the tokens of a tier: those in the lowest one stay there.
  const auto counts = [&](int tier) { return s.moving[tier] && (kind == kEvict || tier < lowest); };
  const int steps = kind == kEvict ? 1 : p.steps;
  if (threadIdx.x == 0) {
    int low = bounds[0], high = bounds[1];
    if (kind == kEvict) low--;
    else if (p.policy == kUniform) low = 0, high = tiers - 1 << kAgeBits;
    else high = __float_as_int(__fmul_rn(__fmul_rn(__int_as_float(high), p.steepest), 2.f));
    s.low = low, s.high = high, s.fitted = 0;
  }
  __syncthreads();
  int counted = 0;
#pragma unroll 1
  for (int tier = 0; tier < tiers; tier++) counted += counts(tier) ? s.moving[tier] : 0;
  enum { kFirst, kNext, kLast } pass = kFirst;  // the last one if only the highest price fits, which was not tried
  for (bool listed = false;;) {
    const int nodes = pass == kLast ? 1 : listed ? kNodes : kFirstNodes;
    if (warp < nodes) {
      int price = pass == kFirst && warp == 0 ? s.low : pass == kLast ? s.high : kUnused;
      if (pass == kFirst && warp == 1) price = decider.price_at(0);
      if (pass == kNext) price = decider.price_at(warp);
      decider.begin(warp, price, listed);
    }
    if (!listed) {
      __syncthreads();
#pragma unroll 1
      for (int tier = 0; tier < tiers; tier++) {
        if (!counts(tier)) continue;
        if (pass == kLast) count<kTiers - 1, 1>(s, 0, key, one(tier), two(tier), tier, steps);
        else if (steps <= 3) count<3, kFirstNodes>(s, 0, key, one(tier), two(tier), tier, steps);
        else
#pragma unroll 1
          for (int node = 0; node < kFirstNodes; node++)
            count<kTiers - 1, 1>(s, node, key, one(tier), two(tier), tier, steps);
      }
      __syncthreads();
    }
    if (warp < nodes) {
      __syncwarp();
      if (s.price[warp] != kUnused) {
#pragma unroll 1
        for (int tier = 0; listed && tier < tiers; tier++) {
          if (!counts(tier)) continue;
          if (steps <= 3) count_listed<3>(s, warp, list, tier, steps);
          else count_listed<kTiers - 1>(s, warp, list, tier, steps);
        }
        __syncwarp();
        decider.decide(warp);
      }
    }
    __syncthreads();
    if (pass == kLast) {
      if (threadIdx.x < kTiers) s.free[threadIdx.x] = s.free_at[0][threadIdx.x], s.able[threadIdx.x] = s.able_at[0][threadIdx.x];
      __syncthreads();
      break;
    }
    if (warp == 0) decider.end(pass == kFirst, nodes);
    __syncthreads();
    pass = kNext;
    if (static_cast<i64>(s.high) - s.low <= kGap) {
      if (s.fitted) break;
      pass = kLast;
      continue;
    }
    if (listed || s.undecided > kListed || 4 * s.undecided > counted) continue;
    listed = true;
    if (threadIdx.x < kCells) s.base[threadIdx.x] = s.at_low[threadIdx.x];
    if (threadIdx.x < 2 * kTiers) {
      const bool is_high = threadIdx.x >= kTiers;
      const int step = threadIdx.x % kTiers;
      (is_high ? s.high_limit : s.low_limit)[step] = decider.limit(is_high ? s.high : s.low, step);
    }
    if (threadIdx.x == 0) {
      int first = 0;
#pragma unroll 1
      for (int tier = 0; tier < tiers; tier++) {
        s.list_first[tier] = first;
        s.list_size[tier] = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++)
          if (decider.matters(tier, step)) first += s.at_high[tier * kTiers + step] - s.at_low[tier * kTiers + step];
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int tier = 0; tier < tiers; tier++) {
      if (!counts(tier)) continue;
      if (steps <= 3) collect<3>(decider, key, one(tier), two(tier), tier, list);
      else collect<kTiers - 1>(decider, key, one(tier), two(tier), tier, list);
    }
    __syncthreads();
  }

  const int high = s.high;
  if (threadIdx.x < kTiers) s.limit[0][threadIdx.x] = decider.limit(high, threadIdx.x);
  __syncthreads();
#pragma unroll 1
  for (int tier = 0; tier < tiers; tier++) {
    if (steps <= 3) assign<3>(decider, key, one(tier), two(tier), tier, target);
    else assign<kTiers - 1>(decider, key, one(tier), two(tier), tier, target);
  }
  if (!p.fills) return;

#pragma unroll 1
  for (int tier = 0; tier < tiers - 1; tier++) {
    const int free = s.free[tier];
    int many = s.able[tier];
    if (!free || !many) continue;
    __syncthreads();
    // A token that has filled a slot is fixed from then on.
    Able able{key, {0, ends[tier]}, {ends[tiers - 1], n}, kind == kEvict ? high + 1 : bounds[0], kFixed};
    if (kind == kChoose && tier >= p.leave_plain)
#pragma unroll 1
      for (int step = p.steps; step > 0; step--)
        if (p.ladder[step] > tier) able.past = s.limit[0][step - 1];
    const auto fill = [&](int i) {
      target[i] = tier;
      key[i] = kFixed;
    };
    if (many <= free) {
      able.each_of([&](int i, int) { if (i >= 0) fill(i); });
      continue;
    }
    // The greatest key that at least `free` tokens reach, or one that few enough reach to rank them.
    bool evenly = false;
    for (int above = min(able.past, bounds[1] + 1); many > kRanked && above - able.reached > 1;) {
      if (!able.list && many <= kListed) {
        if (threadIdx.x == 0) size[0] = 0;
        __syncthreads();
        able.each_of([&](int i, int) { append(list, &size[0], i >= 0, i); });
        __syncthreads();
        able.list = list, able.size = size[0];
      }
      // The first two tries assume that keys are spread evenly.
      const int parts = (evenly = !evenly) ? 2 + many / (2 * kRanked) : 2;
      const int middle = above - max((above - able.reached) / parts, 1);
      const int all = tally(able.count(middle));
      if (all >= free) able.reached = middle, many = all;
      else above = middle;
    }
    const auto position = [&](int i) {
      int now = 0, first = 0;
      while (now < tiers && i >= ends[now]) first = ends[now++];
      return head.token(now, i - first).position;
    };
    if (many <= kRanked) {
      if (threadIdx.x == 0) size[1] = 0;
      __syncthreads();
      able.each_of([&](int i, int) { append(ranked, &size[1], i >= 0, i); });
      __syncthreads();
      const int index = threadIdx.x < many ? ranked[threadIdx.x] : -1, own = index < 0 ? 0 : key[index];
      const int age = index < 0 ? 0 : position(index);
      if (index >= 0) ranked_key[threadIdx.x] = own, ranked_position[threadIdx.x] = age;
      __syncthreads();
      int before = 0;
      for (int i = 0; index >= 0 && i < many; i++)
        before += ranked_key[i] > own || (ranked_key[i] == own && ranked_position[i] > age);
      if (index >= 0 && before < free) fill(index);
      continue;
    }
    // Too many have the same key: take the newest of them.
    const int greater = tally(able.count(able.reached + 1));
    int oldest = 0;
    for (int newest = head.place.length; newest - oldest > 1;) {
      const int middle = (oldest + newest) / 2;
      int own_many = 0;
      able.each_of([&](int i, int own) { own_many += i >= 0 && own == able.reached && position(i) >= middle; });
      if (greater + tally(own_many) >= free) oldest = middle;
      else newest = middle;
    }
    able.each_of([&](int i, int own) { if (i >= 0 && (own > able.reached || position(i) >= oldest)) fill(i); });
  }
}
