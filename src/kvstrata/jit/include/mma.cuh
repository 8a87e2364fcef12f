// Tensor-core products of one warp, and the order of a 16x16 tile's values over its lanes.
//
// A lane is (g = lane / 4, t = lane % 4). The product mma.m16n8k16 takes A [16 x 16] and B [16 x 8], accumulates in
// float32, and leaves rows g and g + 8, columns 2t and 2t + 1 of C [16 x 8] in a lane's four registers.
#pragma once
#include "fp8.cuh"

// Two values of In in one register, the first in the low half.
__device__ __forceinline__ unsigned pair_of(f16, float first, float second) {
  unsigned out;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
}
__device__ __forceinline__ unsigned pair_of(bf16, float first, float second) {
  unsigned out;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
}

__device__ __forceinline__ void mma_16x8x16(f16, float* c, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_16x8x16(bf16, float* c, const unsigned* a, unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Half as deep: A [16 x 8] with rows g in one register and g + 8 in the other, B [8 x 8].
__device__ __forceinline__ void mma_16x8x8(f16, float* c, unsigned a0, unsigned a1, unsigned b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}
