// Single instructions without a C++ equivalent.
#pragma once
#include "fp8.cuh"

__device__ __forceinline__ float exp2_of(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ __forceinline__ float log2_of(float x) {
  float out;
  asm("lg2.approx.f32 %0,%1;" : "=f"(out) : "f"(x));
  return out;
}

// The same number, opaque to the compiler: what follows from it is computed where it is used, and is not kept in registers
// from before the loop.
__device__ __forceinline__ unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Prefetches a line of memory into L2 without waiting.
__device__ __forceinline__ void fetch_ahead(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// On two values per register: maximum, product, and fused multiply-add.
__device__ __forceinline__ unsigned max_pair(f16, unsigned a, unsigned b) {
  unsigned out;
  asm("max.f16x2 %0,%1,%2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ unsigned max_pair(bf16, unsigned a, unsigned b) {
  unsigned out;
  asm("max.bf16x2 %0,%1,%2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
// The larger magnitudes, NaN if there is one; the sign is arbitrary.
__device__ __forceinline__ unsigned larger_pair(f16, unsigned a, unsigned b) {
  unsigned out;
#if __CUDA_ARCH__ >= 900
  asm("max.NaN.xorsign.abs.f16x2 %0,%1,%2;" : "=r"(out) : "r"(a), "r"(b));
#else
  asm("max.NaN.f16x2 %0,%1,%2;" : "=r"(out) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#endif
  return out;
}
__device__ __forceinline__ unsigned larger_pair(bf16, unsigned a, unsigned b) {
  unsigned out;
#if __CUDA_ARCH__ >= 900
  asm("max.NaN.xorsign.abs.bf16x2 %0,%1,%2;" : "=r"(out) : "r"(a), "r"(b));
#else
  asm("max.NaN.bf16x2 %0,%1,%2;" : "=r"(out) : "r"(a & 0x7fff7fffu), "r"(b & 0x7fff7fffu));
#endif
  return out;
}
__device__ __forceinline__ unsigned multiply_pair(f16, unsigned a, unsigned b) {
  unsigned out;
  asm("mul.f16x2 %0,%1,%2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ unsigned multiply_pair(bf16, unsigned a, unsigned b) {  // sm_80 has no mul.bf16x2
  unsigned out;
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));
  return out;
}

__device__ __forceinline__ unsigned fma_pair(f16, unsigned a, unsigned b, unsigned c) {
  unsigned out;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// Transposes an 8x8 matrix over the lanes of a warp, row g in lanes 4g .. 4g + 3.
__device__ __forceinline__ unsigned transpose8x8(unsigned x) {
  unsigned out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(out) : "r"(x));
  return out;
}
