// The planner of plan.py on the device, without sorting and without the host.
//
//   survey  a block per head cache: the keys of its tokens, and how many of each tier stay and may move
//   merge   a block per request and layer, if all heads choose alike: weights summed by position become keys
//   split   a warp per scope: the bytes of each head cache
//   choose  a block per head cache (choose.cu): the lowest price that fits by bisection, targets, and filled slots
//
// Tokens of a head cache are ordered tier by tier, slot by slot, then new ones. Arithmetic is that of plan_reference.py: every
// float operation is rounded separately, sums are of integers.
#include "plan.cuh"

__device__ __forceinline__ void count_one(u64 (&counts)[2], int tier) {
  const u64 one = 1ull << 16 * (tier & 3);
#pragma unroll
  for (int word = 0; word < 2; word++) counts[word] += tier >> 2 == word ? one : 0;
}

// Calls use(index, token) for the tokens of a tier; stored ones are loaded several at a time.
template <class H, class F> __device__ __forceinline__ void each_token(const H& head, int tier, F use) {
  constexpr int kAhead = 4;
  const int n = head.size(tier), ahead = tier < head.p.tiers && (tier || !head.place.unwritten) ? kAhead : 1;
  for (int first = threadIdx.x; first < n; first += ahead * kThreads) {
    Token tokens[kAhead];
    if (ahead == 1) {
      tokens[0] = head.token(tier, first);
    } else {
#pragma unroll
      for (int j = 0; j < kAhead; j++) tokens[j] = head.stored(tier, min(first + j * kThreads, n - 1));
    }
#pragma unroll
    for (int j = 0; j < kAhead; j++)
      if (j < ahead && first + j * kThreads < n) use(first + j * kThreads, tokens[j]);
  }
}

template <class Position, bool kKeeps>
__global__ void __launch_bounds__(kThreads) survey(const __grid_constant__ Params p) {
  __shared__ int sum[kTiers];
  __shared__ u64 total;
  const int head_cache = blockIdx.x;
  const Head<Position, kKeeps> head(p, head_cache / p.heads, head_cache % p.heads);
  int* key = p.key + p.begin[head_cache];
  if (threadIdx.x == 0) total = 0;
  if (threadIdx.x < kTiers) sum[threadIdx.x] = 0;
  __syncthreads();
  u64 moving[2] = {0, 0}, own = 0;
  i64 first = 0;
  for (int tier = 0; tier <= p.tiers; tier++) {
    const int n = head.size(tier), counted = tier == p.tiers ? 0 : tier;
    if (threadIdx.x == 0 && tier < p.tiers) p.starts[static_cast<i64>(head_cache) * p.tiers + tier] = p.begin[head_cache] + first;
    each_token(head, tier, [&](int i, const Token& token) {
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
    });
    first += n;
  }
#pragma unroll
  for (int tier = 0; tier < kTiers; tier++) {
    if (tier >= p.tiers) break;
    const unsigned of_warp = __reduce_add_sync(~0u, static_cast<unsigned>(moving[tier / 4] >> 16 * (tier % 4) & 0xffff));
    if ((threadIdx.x & 31) == 0 && of_warp) atomicAdd(&sum[tier], static_cast<int>(of_warp));
  }
  __syncthreads();
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
    const auto weight = [&](int i) { return __fadd_rn(__fdiv_rn(__int_as_float(key[first + i]), mean), p.floor); };
    if (p.per_head) {
      each_token(head, tier, [&](int i, const Token& token) {
        key[first + i] = head.moves(tier, token.position) ? head.key(tier, token.position, weight(i)) : kFixed;
      });
    } else {
      for (int i = threadIdx.x; i < n; i += kThreads) key[first + i] = __float_as_int(weight(i));
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

template <class = void>
__global__ void __launch_bounds__(32) split(const __grid_constant__ Params p) {
  const int scope = blockIdx.x, lane = threadIdx.x, tiers = p.tiers, lowest = p.ladder[p.steps];
  const int first = p.scopes[scope] * p.heads, end = p.scopes[scope + 1] * p.heads;
  const i64 allowed = p.allowed[scope];
  // Bytes of a head cache: unchanged (kKeep), everything in the lowest tier (kChoose), only what stays (kEvict).
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
