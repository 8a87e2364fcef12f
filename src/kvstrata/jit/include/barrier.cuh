// A barrier among some warps of a block: `number` 1 .. 15 (0 is __syncthreads), `threads` a multiple of 32.
#pragma once

__device__ __forceinline__ void sync_some(int number, int threads) {
  asm volatile("bar.sync %0,%1;" ::"r"(number), "r"(threads) : "memory");
}
