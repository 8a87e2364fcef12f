// Constants of quant/reference.py: the range of rows and scales, the smallest step, and the floor of a product.
#pragma once

constexpr float kLargest = 65504.f, kSmallestStep = 5.9604644775390625e-8f;
constexpr float kMagic = 12582912.f;    // 1.5 * 2^23: a sum with it, rounded down, holds the floor in its low bits
constexpr int kMagicBits = 0x4b400000;  // the bits of kMagic

__device__ __forceinline__ float clean(float x) { return x != x ? 0.f : fminf(fmaxf(x, -kLargest), kLargest); }

// Rounds x to multiples of 2^-18 of the power of two of its row's largest magnitude, for which grid_of gives `magic`.
__device__ __forceinline__ float grid_of(float most) {
  return __uint_as_float((__float_as_uint(most) & 0x7f800000u) + (5u << 23 | 1u << 22));
}
__device__ __forceinline__ float on_grid(float x, float magic) { return __fsub_rn(__fadd_rn(x, magic), magic); }

// The bits of a scale, clamped and rounded to fp16.
__device__ __forceinline__ unsigned short scale_of(float scale) {
  unsigned short out;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(out) : "f"(fminf(fmaxf(scale, 0.f), kLargest)));
  return out;
}
