// The work list of a decode step: what worklist.cu writes, decode.cu reads and combine.cu looks up.
//
// A stage is up to 64 tokens of one page. Stages stand in the order of (tier, request, KV head): those that run at the same
// time on a multiprocessor are then of one tier, and its instructions stay in the cache for them. The stages of one tier
// and KV head are a group. A chunk is stages at .. end - 1, one behind the other by number; they lie where the warp looks
// that takes them, so some places are empty. Both numbers of chunks and groups only ever go up along the list, so number +
// group names one partial result and no other.
#pragma once

struct alignas(16) Stage {
  unsigned long long page;  // its first byte
  int group;                // tier * head_caches + head_cache: (request row, KV head)
  unsigned meta;            // tokens, tier, and which part of its page it is (rows: which stage of its request)
};
__device__ __forceinline__ unsigned meta_of(int tokens, int tier, int part) { return tokens | tier << 7 | part << 10; }
__device__ __forceinline__ int tokens_of(unsigned meta) { return meta & 127; }
__device__ __forceinline__ int tier_of(unsigned meta) { return meta >> 7 & 7; }
__device__ __forceinline__ int part_of(unsigned meta) { return meta >> 10; }

struct alignas(16) Chunk {
  Stage first;  // so that its page can be asked for at once
  int at, end, number, unused;
};

struct Slots {  // the partial results of a group
  int first, count;
};
