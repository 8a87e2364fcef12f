// Shared by the kernels of the planner: parameters, places, and the tokens of a head cache.
#pragma once

#include "coded.cuh"

constexpr int kTiers = kMaxTiers, kThreads = 512, kFixed = 0x7fffffff, kAgeBits = 24, kGap = 64, kDrop = -1;
constexpr double kMass = 137438953472.0, kLeastMass = 1 / kMass;  // 2^37
enum Policy { kImportance, kRecency, kUniform };
enum Kind { kKeep, kChoose, kEvict, kFail };

struct Params {
  const int* table;      // [requests, layers, heads, tiers, max_pages] handles
  const int* count;      // [requests, layers, heads, tiers]
  const i64* pointers;   // [slabs]
  const int* places;     // [3, places]: request * layers + layer, length, 1 if the last plain token is not written yet
  const int2* reports;   // [requests, layers]: queries that reported mass, length at the last report
  const int* fresh;      // [4, places]: new tokens, the first of their rows, ..; null for none
  const float* mass;     // [rows, heads] importance of new tokens; null: that of a token that no query has seen
  const i64* begin;      // [head_caches] the first token in the lists
  const int* scopes;     // [scopes + 1] the first place of each
  const i64* allowed;    // [scopes] bytes
  int* key;              // [n]
  signed char* target;   // [n]
  i64* starts;           // [head_caches, tiers] the first token of each bucket
  int* survey;           // [head_caches, 2, tiers]: tokens that stay, tokens that may move
  float* merged;         // [places, width] weights summed over heads
  i64* share;            // [head_caches] bytes
  int* kind;             // [scopes, 2]: action, and number of plain tokens that there is room for
  i64* needed;           // [scopes] bytes of the cheapest assignment
  i64 price[kTiers];     // of a page
  float slope[kTiers];   // of each step
  int ladder[kTiers];    // tiers after 0, 1, .. steps
  int position_offset[kTiers], importance_offset[kTiers];
  float steepest, settled, floor;  // slope of the last step; weight of a quantised token; added to all weights
  int places_, scopes_, heads, tiers, steps, max_pages, units, page_shift, width;
  int policy, ema, leave_plain, per_head, fills, evict, sinks, recent, headroom;
};

struct Place {
  int length, queries, reported, unwritten, fresh, row;
  __device__ Place(const Params& p, int place)
      : length(p.places[p.places_ + place]),
        queries(p.reports[p.places[place]].x),
        reported(p.reports[p.places[place]].y),
        unwritten(p.places[2 * p.places_ + place]),
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
  // Number of tokens in a tier; in tier `tiers`, of new tokens.
  __device__ int size(int tier) const { return tier < p.tiers ? count[tier] : place.fresh; }

  __device__ Token token(int tier, int i) const {
    if (tier == p.tiers) {
      const float even = __fdiv_rn(1.f, static_cast<float>(max(place.length, 1)));
      const float mass = p.mass ? p.mass[(static_cast<i64>(place.row) + i) * p.heads + head] : p.ema ? even : 0.f;
      return {place.length - place.fresh + i, mass};
    }
    if (place.unwritten && tier == 0 && i == count[0] - 1)
      return {place.length - place.fresh - 1, p.ema ? __fdiv_rn(1.f, static_cast<float>(place.length - place.fresh)) : 0.f};
    return stored(tier, i);
  }
  // A token in a page; without branches, so that several loads can be in flight.
  __device__ __forceinline__ Token stored(int tier, int i) const {
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

__device__ __forceinline__ i64 price_of(const Params& p, int tier, i64 tokens) {
  return (tokens + (1 << p.page_shift) - 1 >> p.page_shift) * p.price[tier];
}
