// Constants of quant/reference.py: the range of rows and scales, the smallest step, and the floor of a product.
#pragma once

constexpr float kLargest = 65504.f, kSmallestStep = 5.9604644775390625e-8f;
constexpr float kMagic = 12582912.f;    // 1.5 * 2^23: a sum with it, rounded down, holds the floor in its low bits
constexpr int kMagicBits = 0x4b400000;  // the bits of kMagic

__device__ __forceinline__ float clean(float x) { return x != x ? 0.f : fminf(fmaxf(x, -kLargest), kLargest); }

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// Rounds x to the grid of its row, for which grid_of gives `magic`: multiples of 2^-22 times the rotation's block times the
// power of two of the row's largest magnitude, or 2^kLeastPower if that is larger.
constexpr int kLeastPower = -30;
template <int kDim>
__device__ __forceinline__ float grid_of(float most) {
  const float power = __uint_as_float(__float_as_uint(fmaxf(most, power_of_two(kLeastPower))) & 0x7f800000u);
  return power * (3 * (kDim & -kDim));  // its last bit is the grid
}
__device__ __forceinline__ float on_grid(float x, float magic) { return __fsub_rn(__fadd_rn(x, magic), magic); }

// The bits of a scale, clamped and rounded to fp16.
__device__ __forceinline__ unsigned short scale_of(float scale) {
  unsigned short out;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(out) : "f"(fminf(fmaxf(scale, 0.f), kLargest)));
  return out;
}
