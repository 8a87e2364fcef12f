// Programmatic dependent launch (sm_90): a grid may start before the one ahead of it in the stream has ended.
//
// wait_for_previous() returns once the previous grid's writes are visible; release_next() lets the next grid start
// its own prologue. Both are no-ops for a grid that was launched without the attribute.
#pragma once

#if __CUDA_ARCH__ >= 900
constexpr bool kOverlaps = true;  // whether grids can
#else
constexpr bool kOverlaps = false;
#endif

__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void release_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
