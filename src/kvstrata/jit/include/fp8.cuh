// fp32, fp16 and bf16 to fp8 (e4m3fn, e5m2): scaled, rounded to nearest even, saturated to the largest finite value.
//
// sm_89 and newer convert in hardware; older ones by integer arithmetic with the same result for every input. NaN
// becomes 0x7f in both formats.
#pragma once
#include "vec.cuh"

struct f32 { unsigned bits; };
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
struct e4m3 {};
struct e5m2 {};

__device__ __forceinline__ float to_float(f32 x) { return __uint_as_float(x.bits); }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) {
  float out;
  asm("cvt.f32.f16 %0,%1;" : "=f"(out) : "h"(x.bits));
  return out;
}

// Element i of a run of In.
template <class In, int kBytes>
__device__ __forceinline__ float element(const Vec<kBytes>& run, int i) {
  if constexpr (sizeof(In) == sizeof(run.words[0])) return to_float(In{run.words[i]});
  else return to_float(In{static_cast<unsigned short>(run.words[i / 2] >> (i % 2 * 16))});
}

// kMantissa bits of mantissa; the smallest normal is 2^kMinExponent; `largest` is the largest finite value.
template <int kMantissa, int kMinExponent>
__device__ __forceinline__ unsigned round_to_fp8(float x, float largest) {
  const unsigned sign = (__float_as_uint(x) >> 24) & 0x80u;
  const float a = fminf(fabsf(x), largest);
  if (x != x) return 0x7fu;
  if (a < __uint_as_float(static_cast<unsigned>(kMinExponent + 127) << 23)) {
    // The sum's low mantissa bits count steps of the smallest subnormal, rounded to even by the adder.
    const float magic = __uint_as_float(static_cast<unsigned>(23 + kMinExponent - kMantissa + 127) << 23);
    return sign | (__float_as_uint(a + magic) - __float_as_uint(magic));
  }
  constexpr int kShift = 23 - kMantissa;
  const unsigned bits = __float_as_uint(a);
  const unsigned rounded = (bits + ((1u << (kShift - 1)) - 1u) + ((bits >> kShift) & 1u)) >> kShift;
  return sign | (rounded - (static_cast<unsigned>(kMinExponent - 1 + 127) << kMantissa));
}

// Two values to two bytes, the first one in the low byte.
template <class Out>
__device__ __forceinline__ unsigned short to_fp8x2(float first, float second);

template <>
__device__ __forceinline__ unsigned short to_fp8x2<e4m3>(float first, float second) {
#if __CUDA_ARCH__ >= 890
  unsigned short out;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(out) : "f"(second), "f"(first));
  return out;
#else
  return static_cast<unsigned short>(round_to_fp8<3, -6>(first, 448.f) | round_to_fp8<3, -6>(second, 448.f) << 8);
#endif
}

template <>
__device__ __forceinline__ unsigned short to_fp8x2<e5m2>(float first, float second) {
#if __CUDA_ARCH__ >= 890
  unsigned short out;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0,%1,%2;" : "=h"(out) : "f"(second), "f"(first));
  return out;
#else
  return static_cast<unsigned short>(round_to_fp8<2, -14>(first, 57344.f) | round_to_fp8<2, -14>(second, 57344.f) << 8);
#endif
}
