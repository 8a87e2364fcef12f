// Asynchronous copies from global to shared memory (sm_80 and newer), as inline PTX.
//
// `ca` keeps the line in L1, `cg` bypasses it and exists for 16 bytes only. Copies of one thread are grouped by
// commit_group(); wait_group<n>() returns when at most n of its groups are still in flight, and makes their bytes
// visible to that thread only: other threads need a barrier after it.
#pragma once

__device__ __forceinline__ unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

template <int kBytes>
__device__ __forceinline__ void cp_async_ca(void* shared, const void* global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(shared_address(shared)), "l"(global), "n"(kBytes)
               : "memory");
}

template <int kBytes>
__device__ __forceinline__ void cp_async_cg(void* shared, const void* global) {
  static_assert(kBytes == 16, "cp.async.cg copies 16 bytes");
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// 4, 8 or a multiple of 16 bytes: bypasses L1 if the width allows it.
template <int kBytes>
__device__ __forceinline__ void cp_async(void* shared, const void* global) {
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes; i += 16)
      cp_async_cg<16>(static_cast<char*>(shared) + i, static_cast<const char*>(global) + i);
  } else {
    cp_async_ca<kBytes>(shared, global);
  }
}

// 4, 8 or 16 bytes to an address in shared memory, or zeros if there is no source: `global` is then not read.
// kLine: with 16 bytes, the whole line is fetched into L2, for those who copy the rest of it next.
template <int kBytes, bool kLine = false>
__device__ __forceinline__ void cp_async_or_zero(unsigned shared, const void* global, bool there) {
  const int bytes = there ? kBytes : 0;
  if constexpr (kBytes == 16 && kLine)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
  else if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0],[%1],%2,%3;" ::"r"(shared), "l"(global), "n"(kBytes), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int kPending>
__device__ __forceinline__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
