// The planner of plan.py on the device: nothing is sorted, and the host is not asked.
//
//   survey  a block per head cache: the keys of its tokens, and how many of each tier stay and may move
//   merge   a block per request and layer, where all heads choose alike: weights summed by position become keys
//   split   a warp per scope: the bytes of each head cache
//   choose  a block per head cache: the least price that fits by bisection, targets, and slots filled
//
// Tokens of a head cache stand tier by tier, slot by slot, then new ones. Arithmetic is that of plan_reference.py: every
// float operation is rounded on its own, sums are of integers.
#include "coded.cuh"

constexpr int kTiers = kMaxTiers, kThreads = 512, kFixed = 0x7fffffff, kAgeBits = 24, kGap = 64, kDrop = -1;
constexpr double kMass = 137438953472.0, kLeastMass = 1 / kMass;  // 2^37
enum Policy { kImportance, kRecency, kUniform };
enum Kind { kKeep, kChoose, kEvict, kFail };

struct Params {
  const int* table;      // [requests, layers, heads, tiers, max_pages] handles
  const int* count;      // [requests, layers, heads, tiers]
  const i64* pointers;   // [slabs]
  const int* places;     // [2, places]: request * layers + layer, length
  const int2* reports;   // [requests, layers]: queries that gave their mass, length when they last did
  const int* fresh;      // [4, places]: new tokens, the first of their rows, ..; null for none
  const float* mass;     // [rows, heads] importance of new tokens; null: that of a token nobody has seen
  const i64* begin;      // [head_caches] the first token in the lists
  const int* scopes;     // [scopes + 1] the first place of each
  const i64* allowed;    // [scopes] bytes
  int* key;              // [n]
  signed char* target;   // [n]
  i64* starts;           // [head_caches, tiers] the first token of each bucket
  int* survey;           // [head_caches, 2, tiers]: tokens that stay, tokens that may move
  float* merged;         // [places, width] weights summed over heads
  i64* share;            // [head_caches] bytes
  int* kind;             // [scopes, 2]: what is done, plain tokens that there is room for
  i64* needed;           // [scopes] bytes of the cheapest assignment
  i64 price[kTiers];     // of a page
  float slope[kTiers];   // of each step
  int ladder[kTiers];    // tiers after 0, 1, .. steps
  int position_offset[kTiers], importance_offset[kTiers];
  float steepest, settled, floor;  // slope of the last step; weight of a quantised token; what is added to all
  int places_, scopes_, heads, tiers, steps, max_pages, units, page_shift, width;
  int policy, ema, leave_plain, per_head, fills, evict, sinks, recent, headroom, shared;
};

struct Place {
  int length, queries, reported, fresh, row;
  __device__ Place(const Params& p, int place)
      : length(p.places[p.places_ + place]),
        queries(p.reports[p.places[place]].x),
        reported(p.reports[p.places[place]].y),
        fresh(p.fresh ? p.fresh[place] : 0),
        row(p.fresh ? p.fresh[p.places_ + place] : 0) {}
};

struct Token {
  int position;
  float importance;
};

// The tokens of one head cache.
template <class Position, bool kKeeps>
struct Head {
  const Params& p;
  const Place place;
  const int* table;
  const int* count;
  int head;

  __device__ Head(const Params& p, int index, int head) : p(p), place(p, index), head(head) {
    const i64 bucket = (static_cast<i64>(p.places[index]) * p.heads + head) * p.tiers;
    table = p.table + bucket * p.max_pages;
    count = p.count + bucket;
  }
  // How many are in a tier; in tier `tiers`, those that are new.
  __device__ int size(int tier) const { return tier < p.tiers ? count[tier] : place.fresh; }

  __device__ Token token(int tier, int i) const {
    if (tier == p.tiers) {
      const float even = __fdiv_rn(1.f, static_cast<float>(max(place.length, 1)));
      const float mass = p.mass ? p.mass[(static_cast<i64>(place.row) + i) * p.heads + head] : p.ema ? even : 0.f;
      return {place.length - place.fresh + i, mass};
    }
    const int handle = table[tier * p.max_pages + (i >> p.page_shift)], row = i & ((1 << p.page_shift) - 1);
    const char* page = reinterpret_cast<const char*>(p.pointers[handle / p.units]) + static_cast<i64>(handle % p.units) * 64;
    return {reinterpret_cast<const Position*>(page + p.position_offset[tier])[row],
            kKeeps ? reinterpret_cast<const float*>(page + p.importance_offset[tier])[row] : 0.f};
  }
  __device__ bool moves(int tier, int position) const {
    const bool plain = tier == 0 || tier == p.tiers;
    return !plain || !(position < p.sinks || position >= place.length - p.recent);
  }
  __device__ float mass(const Token& token) const {
    const float even = __fdiv_rn(1.f, static_cast<float>(max(place.length, 1)));
    float mass;
    if (p.ema) {
      mass = __fadd_rn(fmaxf(token.importance, 0.f), __fmul_rn(1e-3f, even));
    } else {
      const int seen = max(min(place.queries, place.reported - token.position), 0);
      mass = __fdiv_rn(__fadd_rn(token.importance, even), __fadd_rn(static_cast<float>(seen), 1.f));
    }
    return fminf(mass, 64.f);
  }
  // The key of a token of this weight.
  __device__ int key(int tier, int position, float weight) const {
    const float part = __fdiv_rn(static_cast<float>(position), static_cast<float>(place.length));
    weight = __fmul_rn(weight, __fadd_rn(1.f, __fmul_rn(1e-3f, part)));
    return __float_as_int(tier > 0 && tier < p.tiers ? __fmul_rn(weight, p.settled) : weight);
  }
};

constexpr int kSums = kTiers * kTiers;

// Sums over a block, of which several are made one after the other: three buffers take turns.
struct Sums {
  int (*buffers)[kSums];
  int number = 0;

  __device__ explicit Sums(int (*buffers)[kSums]) : buffers(buffers) {
    if (threadIdx.x < kSums) buffers[0][threadIdx.x] = 0;
    __syncthreads();
  }
  // Adds `counts` of every thread, 16 bits each, those from `tier` on; for all lanes of a warp together.
  __device__ void add(const u64 (&counts)[2], int tier, int tiers, int row = 0) {
    int* sums = buffers[number % 3] + row;
#pragma unroll
    for (int i = 0; i < kTiers; i++) {
      if (i < tier) continue;
      if (i >= tiers) break;
      const unsigned sum = __reduce_add_sync(~0u, static_cast<unsigned>(counts[i / 4] >> 16 * (i % 4) & 0xffff));
      if ((threadIdx.x & 31) == 0 && sum) atomicAdd(&sums[i], static_cast<int>(sum));
    }
  }
  // What was added, valid until the next call but one.
  __device__ int* done() {
    int* sums = buffers[number % 3];
    number++;
    if (threadIdx.x < kSums) buffers[number % 3][threadIdx.x] = 0;
    __syncthreads();
    return sums;
  }
};

__device__ __forceinline__ void count_one(u64 (&counts)[2], int tier) {
  const u64 one = 1ull << 16 * (tier & 3);
#pragma unroll
  for (int word = 0; word < 2; word++) counts[word] += tier >> 2 == word ? one : 0;
}

template <class Position, bool kKeeps>
__global__ void __launch_bounds__(kThreads) survey(const __grid_constant__ Params p) {
  __shared__ int buffers[3][kSums];
  __shared__ u64 total;
  const int head_cache = blockIdx.x;
  const Head<Position, kKeeps> head(p, head_cache / p.heads, head_cache % p.heads);
  int* key = p.key + p.begin[head_cache];
  if (threadIdx.x == 0) total = 0;
  Sums sums(buffers);
  u64 moving[2] = {0, 0}, own = 0;
  i64 first = 0;
  for (int tier = 0; tier <= p.tiers; tier++) {
    const int n = head.size(tier), counted = tier == p.tiers ? 0 : tier;
    if (threadIdx.x == 0 && tier < p.tiers) p.starts[static_cast<i64>(head_cache) * p.tiers + tier] = p.begin[head_cache] + first;
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const Token token = head.token(tier, i);
      const bool moves = head.moves(tier, token.position);
      if (moves) count_one(moving, counted);
      int value = kFixed;
      if (p.policy == kUniform) {
        if (moves) value = static_cast<int>((2ll * token.position + 1 << (kAgeBits - 1)) / head.place.length);
      } else if (p.policy == kRecency) {
        if (moves) value = __float_as_int(__fdiv_rn(1.f, static_cast<float>(head.place.length - token.position)));
      } else {
        const float mass = head.mass(token);
        if (moves) own += static_cast<u64>(static_cast<double>(mass) * kMass);
        value = __float_as_int(mass);
      }
      key[first + i] = value;
    }
    first += n;
  }
  sums.add(moving, 0, p.tiers);
  const int* sum = sums.done();
  int many = 0;
  for (int tier = 0; tier < p.tiers; tier++) many += sum[tier];
  if (threadIdx.x < p.tiers) {
    const int tier = threadIdx.x, all = head.size(tier) + (tier == 0 ? head.place.fresh : 0);
    int* line = p.survey + static_cast<i64>(head_cache) * 2 * p.tiers;
    line[tier] = all - sum[tier];
    line[p.tiers + tier] = sum[tier];
  }
  if (p.policy != kImportance) return;
  for (int step = 16; step; step /= 2) own += __shfl_xor_sync(~0u, own, step);
  if ((threadIdx.x & 31) == 0) atomicAdd(&total, own);
  __syncthreads();
  const double exact = static_cast<double>(static_cast<i64>(total)) / static_cast<double>(max(many, 1)) * kLeastMass;
  const float mean = fmaxf(static_cast<float>(exact), static_cast<float>(kLeastMass));
  first = 0;
  for (int tier = 0; tier <= p.tiers; tier++) {
    const int n = head.size(tier);
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const float weight = __fadd_rn(__fdiv_rn(__int_as_float(key[first + i]), mean), p.floor);
      if (p.per_head) {
        const int position = head.token(tier, i).position;
        key[first + i] = head.moves(tier, position) ? head.key(tier, position, weight) : kFixed;
      } else {
        key[first + i] = __float_as_int(weight);
      }
    }
    first += n;
  }
}

template <class Position, bool kKeeps>
__global__ void __launch_bounds__(kThreads) merge(const __grid_constant__ Params p) {
  const int place = blockIdx.x;
  float* merged = p.merged + static_cast<i64>(place) * p.width;
  const int length = p.places[p.places_ + place];
  for (int i = threadIdx.x; i < length; i += kThreads) merged[i] = 0.f;
  for (int pass = 0; pass < 2; pass++)
    for (int h = 0; h < p.heads; h++) {
      __syncthreads();
      const Head<Position, kKeeps> head(p, place, h);
      int* key = p.key + p.begin[place * p.heads + h];
      for (int tier = 0; tier <= p.tiers; tier++) {
        const int n = head.size(tier);
        for (int i = threadIdx.x; i < n; i += kThreads) {
          const int position = head.token(tier, i).position;
          if (pass == 0) merged[position] = __fadd_rn(merged[position], __int_as_float(key[i]));
          else key[i] = head.moves(tier, position) ? head.key(tier, position, merged[position]) : kFixed;
        }
        key += n;
      }
    }
}

__device__ __forceinline__ i64 summed(i64 x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ i64 price_of(const Params& p, int tier, i64 tokens) {
  return (tokens + (1 << p.page_shift) - 1 >> p.page_shift) * p.price[tier];
}

template <class = void>
__global__ void __launch_bounds__(32) split(const __grid_constant__ Params p) {
  const int scope = blockIdx.x, lane = threadIdx.x, tiers = p.tiers, lowest = p.ladder[p.steps];
  const int first = p.scopes[scope] * p.heads, end = p.scopes[scope + 1] * p.heads;
  const i64 allowed = p.allowed[scope];
  // Bytes of a head cache: as it is (kKeep), everything in the lowest tier (kChoose), nothing but what stays (kEvict).
  const auto bytes = [&](int head_cache, int what, int spare) {
    const int* line = p.survey + static_cast<i64>(head_cache) * 2 * tiers;
    i64 sum = 0, low = 0;
    for (int tier = 0; tier < tiers; tier++) {
      const bool goes = what == kChoose && tier < lowest;
      i64 tokens = line[tier] + (tier == 0 ? spare : 0);
      if (goes) low += line[tiers + tier];
      else if (what != kEvict) tokens += line[tiers + tier];
      if (what == kChoose && tier == lowest) tokens += low;
      sum += price_of(p, tier, tokens);
    }
    return sum;
  };
  const auto total = [&](int what, int spare) {
    i64 sum = 0;
    for (int i = first + lane; i < end; i += 32) sum += bytes(i, what, spare);
    return summed(sum);
  };
  i64 many = 0, all = 0;
  for (int i = first + lane; i < end; i += 32)
    for (int tier = 0; tier < tiers; tier++) {
      const int moving = p.survey[(static_cast<i64>(i) * 2 + 1) * tiers + tier];
      many += moving;
      all += moving + p.survey[static_cast<i64>(i) * 2 * tiers + tier];
    }
  many = summed(many);
  all = summed(all);
  int kind = all ? kFail : kKeep, spare = p.headroom;
  for (int what = kChoose; kind == kFail && what <= (p.evict ? kEvict : kChoose); what++) {
    for (spare = p.headroom;; spare /= 2) {
      if (total(kKeep, spare) <= allowed) {
        kind = kKeep;
        break;
      }
      const i64 least = total(what, spare);
      if (least <= allowed) {
        kind = what;
        for (int i = first + lane; i < end; i += 32) {
          i64 own = 0;
          for (int tier = 0; tier < tiers; tier++) own += p.survey[(static_cast<i64>(i) * 2 + 1) * tiers + tier];
          p.share[i] = bytes(i, what, spare) + (allowed - least) * own / max(many, 1ll);
        }
        break;
      }
      if (!spare) break;
    }
  }
  const i64 needed = total(kChoose, 0);
  if (lane == 0) {
    p.kind[2 * scope] = kind;
    p.kind[2 * scope + 1] = kind == kFail ? 0 : spare;
    p.needed[scope] = needed;
  }
}

// A block's walk over the tokens of a head cache; `ends` are those of the tiers, new tokens last.
struct Walk {
  const int* ends;
  int tiers;
  Sums sums;

  // Calls use(index, tier it is in now) for each token of this thread.
  template <class F> __device__ __forceinline__ void each(F use) const {
    int i = threadIdx.x;
    for (int tier = 0; tier <= tiers; tier++)
      for (; i < ends[tier]; i += kThreads) use(i, tier == tiers ? 0 : tier);
  }
  // Tokens of the block for which it holds.
  template <class F> __device__ __forceinline__ int tally(F holds) {
    u64 counts[2] = {0, 0};
    each([&](int i, int tier) { counts[0] += holds(i, tier); });
    sums.add(counts, 0, 1);
    return sums.done()[0];
  }
};

template <class Position, bool kKeeps>
__global__ void __launch_bounds__(kThreads) choose(const __grid_constant__ Params p) {
  extern __shared__ int nearby[];
  __shared__ int buffers[3][kSums];
  __shared__ int bounds[2], ends[kTiers + 2];
  const int head_cache = blockIdx.x, place = head_cache / p.heads, tiers = p.tiers;
  const Head<Position, kKeeps> head(p, place, head_cache % p.heads);
  int scope = 0;
  for (int from = 0, to = p.scopes_; from < to;) {
    scope = (from + to) / 2;
    if (p.scopes[scope + 1] <= place) from = scope + 1;
    else if (p.scopes[scope] > place) to = scope;
    else break;
  }
  const int kind = p.kind[2 * scope], spare = p.kind[2 * scope + 1];
  const i64 begin = p.begin[head_cache], share = p.share[head_cache];
  signed char* target = p.target + begin;
  if (threadIdx.x == 0) {
    int end = 0;
    for (int tier = 0; tier <= tiers; tier++) ends[tier] = end += head.size(tier);
  }
  if (threadIdx.x < 2) bounds[threadIdx.x] = threadIdx.x ? 0 : kFixed;
  Walk walk{ends, tiers, Sums(buffers)};
  const int n = ends[tiers];
  int* const far = p.key + begin;
  const int* key = far;
  bool chooses = kind == kChoose || kind == kEvict;
  if (chooses) {
    int least = kFixed, most = 0;
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const int own = far[i];
      if (p.shared) nearby[i] = own;
      if (own == kFixed) continue;
      least = min(least, own);
      most = max(most, own);
    }
    if (p.shared) key = nearby;
    atomicMin(&bounds[0], least);
    atomicMax(&bounds[1], most);
    __syncthreads();
    chooses = bounds[0] != kFixed;
  }
  if (!chooses) {
    walk.each([&](int i, int tier) { target[i] = tier; });
    return;
  }
  const int* line = p.survey + static_cast<i64>(head_cache) * 2 * tiers;
  const int lowest = p.ladder[p.steps], widest = p.leave_plain;
  __shared__ int limit[kTiers], held[kTiers], fit;
  // Whether tokens that may move, `moved` by tier and target, fit when empty slots are filled; uses them up.
  const auto fits = [&](int* moved) {
    if (threadIdx.x < tiers) {
      const int to = threadIdx.x;
      int sum = line[to] + (to == 0 ? spare : 0), able = 0;
      for (int tier = 0; tier < tiers; tier++) {
        sum += moved[tier * kTiers + to];
        moved[tier * kTiers + to] = able += moved[tier * kTiers + to];  // in this tier or in one above
      }
      held[to] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int tier = 0; p.fills && tier < tiers - 1; tier++) {
        int free = -held[tier] & (1 << p.page_shift) - 1;
        for (int other = tier + 1; free && other < tiers; other++) {
          const int filled = min(free, moved[tier * kTiers + other]);
          if (!filled) continue;
          free -= filled;
          held[tier] += filled;
          held[other] -= filled;
          for (int below = tier; below < other; below++) moved[below * kTiers + other] -= filled;
        }
      }
      i64 bytes = 0;
      for (int tier = 0; tier < tiers; tier++) bytes += price_of(p, tier, held[tier]);
      fit = bytes <= share;
    }
    __syncthreads();
    return fit != 0;
  };
  const auto set_limits = [&](int price) {
    __syncthreads();
    if (threadIdx.x < p.steps) {
      const int step = threadIdx.x;
      limit[step] = p.policy == kUniform ? min(max(price - (step << kAgeBits), 0), 1 << kAgeBits)
                                         : __float_as_int(__fdiv_rn(__int_as_float(price), p.slope[step]));
    }
    __syncthreads();
  };
  const auto settled = [&](int own, int tier) {
    int steps = 0;
    while (steps < p.steps && own < limit[steps]) steps++;
    return max(max(tier, widest), p.ladder[steps]);
  };
  int low = bounds[0], high = bounds[1];
  if (kind == kEvict) low--;
  else if (p.policy == kUniform) low = 0, high = tiers - 1 << kAgeBits;
  else high = __float_as_int(__fmul_rn(__fmul_rn(__int_as_float(high), p.steepest), 2.f));
  for (int middle = low;; middle = static_cast<int>((static_cast<i64>(low) + high) / 2)) {
    if (kind == kChoose) set_limits(middle);
    int i = threadIdx.x;
    for (int tier = 0; tier < tiers; tier++) {
      u64 counts[2] = {0, 0};
      const auto use = [&](int own) {
        if (own == kFixed) return;
        if (kind == kChoose) count_one(counts, settled(own, tier));
        else if (own > middle) count_one(counts, max(max(tier, widest), lowest));
      };
      for (; i < ends[tier]; i += kThreads) use(key[i]);
      if (tier == 0)  // new tokens are plain
        for (int j = ends[tiers - 1] + threadIdx.x; j < n; j += kThreads) use(key[j]);
      walk.sums.add(counts, tier, tiers, tier * kTiers);
    }
    if (fits(walk.sums.done())) high = middle;
    else low = middle;
    if (static_cast<i64>(high) - low <= kGap) break;
  }
  if (kind == kChoose) set_limits(high);
  walk.each([&](int i, int tier) {
    const int own = key[i];
    int to = tier;
    if (own != kFixed) to = kind == kChoose ? settled(own, tier) : own <= high ? kDrop : max(max(tier, widest), lowest);
    target[i] = to;
  });
  if (!p.fills) return;

  for (int tier = 0; tier < tiers - 1; tier++) {
    const auto able = [&](int i, int now) { return key[i] != kFixed && now <= tier && target[i] > tier; };
    const int filled = walk.tally([&](int i, int now) { return target[i] == tier; });
    const int free = -(filled + (tier == 0 ? spare : 0)) & (1 << p.page_shift) - 1;
    if (!free) continue;
    if (walk.tally(able) <= free) {
      walk.each([&](int i, int now) { if (able(i, now)) target[i] = tier; });
      continue;
    }
    // The greatest key that at least `free` tokens reach; among those that have it, the newest.
    int reached = bounds[0], above = bounds[1] + 1;
    while (above - reached > 1) {
      const int middle = reached + (above - reached) / 2;
      const int many = walk.tally([&](int i, int now) { return able(i, now) && key[i] >= middle; });
      if (many >= free) reached = middle;
      else above = middle;
    }
    const int greater = walk.tally([&](int i, int now) { return able(i, now) && key[i] > reached; });
    const int equal = walk.tally([&](int i, int now) { return able(i, now) && key[i] == reached; });
    const auto position = [&](int i, int now) {
      const int begins = i >= ends[tiers - 1] ? ends[tiers - 1] : now ? ends[now - 1] : 0;
      return head.token(i >= ends[tiers - 1] ? tiers : now, i - begins).position;
    };
    int oldest = 0;
    if (greater + equal > free) {
      for (int past = head.place.length; past - oldest > 1;) {
        const int middle = (oldest + past) / 2;
        const int many = walk.tally([&](int i, int now) { return able(i, now) && key[i] == reached && position(i, now) >= middle; });
        if (greater + many >= free) oldest = middle;
        else past = middle;
      }
    }
    walk.each([&](int i, int now) {
      if (able(i, now) && (key[i] > reached || (key[i] == reached && position(i, now) >= oldest))) target[i] = tier;
    });
  }
}
