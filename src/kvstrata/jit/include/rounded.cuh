// Correctly rounded float32 roots, reciprocals and quotients of numbers well within the normal range, without the branch
// that others need. tests/test_rounded.py compares all mantissas.
#pragma once

__device__ __forceinline__ float square_root(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  const float root = x * r;
  return fmaf(fmaf(-root, root, x), 0.5f * r, root);
}
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return fmaf(r, -fmaf(x, r, -1.f), r);
}
__device__ __forceinline__ float divide(float a, float b) {
  const float r = reciprocal(b), quotient = a * r;
  return fmaf(fmaf(-quotient, b, a), r, quotient);
}
