// The work list of a decode step: what worklist.cu writes, decode.cu reads and combine.cu looks up.
//
// A stage is up to 64 tokens of one page. Stages are ordered by (tier, request, KV head), so that warps which share a
// multiprocessor work on one tier and its code stays in the instruction cache. The stages of one tier and KV head are a
// bucket. A chunk is stages at .. end - 1; chunks are numbered in list order and stored where the warp that takes them looks,
// so some entries are empty. Numbers of chunks and buckets only increase along the list, so number + bucket identifies one
// partial.
#pragma once

struct alignas(16) Stage {
  unsigned long long page;  // address of the page
  int bucket;               // tier * head_caches + head_cache: (request row, KV head)
  unsigned meta;            // tokens, tier, which part of its page it is (rows: which stage of its request), and whether
                            // another row of the step gives the page's mass
};
__device__ __forceinline__ unsigned meta_of(int tokens, int tier, int part) { return tokens | tier << 7 | part << 10; }
__device__ __forceinline__ int tokens_of(unsigned meta) { return meta & 127; }
__device__ __forceinline__ int tier_of(unsigned meta) { return meta >> 7 & 7; }
constexpr unsigned kSpokenFor = 1u << 31;
__device__ __forceinline__ int part_of(unsigned meta) { return (meta & ~kSpokenFor) >> 10; }

struct alignas(16) Chunk {
  Stage first;  // so that its copy can start at once
  int begin, end, number, unused;
};

struct Slots {  // partials of a bucket
  int first, count;
};
