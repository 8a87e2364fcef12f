// Copies blocks of packed pages between pools on the device or in pinned host memory: one launch for all pairs.
//
// A thread moves 16 bytes at a time, kPer of them in flight; a block of threads takes a piece of one pair's bytes.
#include "vec.cuh"

using i64 = long long;

struct Params {
  const char* source;
  char* target;
  const void* source_blocks;  // Index [pairs]; negative or past the end: the pair is skipped
  const void* target_blocks;
  i64 source_block, source_head, target_block, target_head;  // strides in bytes
  i64 source_count, target_count;                            // blocks of the pools
  int heads, vectors;                                          // vectors of 16 bytes of one head
};

template <class Index, int kPer>
__global__ void __launch_bounds__(256) copy_pages(const __grid_constant__ Params p) {
  const i64 from = static_cast<const Index*>(p.source_blocks)[blockIdx.x];
  const i64 to = static_cast<const Index*>(p.target_blocks)[blockIdx.x];
  if (from < 0 || to < 0 || from >= p.source_count || to >= p.target_count) return;
  const char* source = p.source + from * p.source_block;
  char* target = p.target + to * p.target_block;
  const int first = blockIdx.y * 256 * kPer + threadIdx.x, all = p.heads * p.vectors;
  Vec<16> x[kPer];
#pragma unroll
  for (int i = 0; i < kPer; i++) {
    const int vector = first + i * 256, head = vector / p.vectors;
    if (vector < all) x[i] = load_once<16>(source + head * p.source_head + (vector - head * p.vectors) * 16);
  }
#pragma unroll
  for (int i = 0; i < kPer; i++) {
    const int vector = first + i * 256, head = vector / p.vectors;
    if (vector < all) store(target + head * p.target_head + (vector - head * p.vectors) * 16, x[i]);
  }
}
