// A ring of stages in shared memory that one warp fills and drains on its own, without waiting for other warps.
//
// On sm_90 a stage is filled by bulk copies, which an mbarrier counts; before that by cp.async of every lane. Lanes that are
// mine() call begin() and copy() for each run of bytes, all call commit() and, when they need the stage, wait(). The lanes
// must agree (__syncwarp) that a stage has been read before it is filled again.
#pragma once
#include "cp_async.cuh"

template <int kStages>
struct Ring {
  unsigned long long* bars;  // kStages, in shared memory; sm_90 only
  unsigned phase = 0;        // a bit per stage

  __device__ __forceinline__ explicit Ring(unsigned long long* bars) : bars(bars) {
#if __CUDA_ARCH__ >= 900
    if ((threadIdx.x & 31) < kStages)
      asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(shared_address(bars + (threadIdx.x & 31))) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncwarp();
#endif
  }

  // True if this lane takes part in filling: one lane issues bulk copies, otherwise all lanes copy.
  static __device__ __forceinline__ bool mine() {
#if __CUDA_ARCH__ >= 900
    return (threadIdx.x & 31) == 0;
#else
    return true;
#endif
  }

  // Total bytes of the stage's copies.
  __device__ __forceinline__ void begin(int stage, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(shared_address(bars + stage)), "r"(bytes)
                 : "memory");
#endif
  }

  // `bytes`, a multiple of 16, from and to addresses that are multiples of 16.
  __device__ __forceinline__ void copy(int stage, void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(bars + stage))
                 : "memory");
#else
    for (int i = (threadIdx.x & 31) * 16; i < bytes; i += 512)
      cp_async<16>(static_cast<char*>(to) + i, static_cast<const char*>(from) + i);
#endif
  }

  // Same for a run that only this lane copies.
  __device__ __forceinline__ void copy_of_lane(int stage, void* to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
    copy(stage, to, from, bytes);
#else
    for (int i = 0; i < bytes; i += 16) cp_async<16>(static_cast<char*>(to) + i, static_cast<const char*>(from) + i);
#endif
  }

  __device__ __forceinline__ void commit() {
#if __CUDA_ARCH__ < 900
    commit_group();
#endif
  }

  // Waits for the oldest of `pending` stages in flight.
  __device__ __forceinline__ void wait(int stage, int pending) {
#if __CUDA_ARCH__ >= 900
    const unsigned address = shared_address(bars + stage), parity = phase >> stage & 1;
    unsigned done;
    do {
      asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2; selp.u32 %0,1,0,p;}"
                   : "=r"(done)
                   : "r"(address), "r"(parity)
                   : "memory");
    } while (!done);
    phase ^= 1u << stage;
#else
    if (pending == kStages) wait_group<kStages - 1>();
    else wait_group<0>();
    __syncwarp();
#endif
  }

  // After plain writes to a stage, before it is filled again.
  static __device__ __forceinline__ void fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
  }
};
