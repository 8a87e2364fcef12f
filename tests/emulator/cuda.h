// CUDA C++ as plain C++: every thread of a block is a fibre of one OS thread; they take turns where CUDA makes them wait for
// each other. For tests without a GPU; it shows wrong arithmetic and wrong addresses, not races.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

// EMULATED functions are those of runtime.cpp, a library that is compiled once and optimised. Kernels are many: most of
// the time on each is the compiler's, so that they are compiled without optimisation and with little to read.
#ifdef EMULATOR_RUNTIME
#define EMULATED
#else
#define EMULATED inline __attribute__((gnu_inline))
#endif

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 900

template <class T> constexpr T max(const T& a, const T& b) { return a < b ? b : a; }
template <class T> constexpr T min(const T& a, const T& b) { return b < a ? b : a; }

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct int2 { int x, y; };
struct int3 { int x, y, z; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct dim3 { int x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern unsigned char* dynamic_shared;
extern unsigned dynamic_bytes;  // that the launch asked for

// Threads that meet: each brings some bytes, and sees those of its warp.
using Brought = const uint64_t (*)[8];
Brought exchange(const void* mine, size_t bytes);
void __syncwarp();
void __syncthreads();
int __syncthreads_count(int predicate);
void sync_some(int number, int threads);
void run_blocks(void (*thread_body)(), int grid_x, int grid_y, int threads, int shared_bytes);

template <class T>
inline Brought exchange(const T& mine) {
  static_assert(sizeof(T) <= 64);
  return exchange(&mine, sizeof(T));
}
template <class T>
inline T from(Brought all, int lane) {
  T out;
  std::memcpy(&out, all[lane], sizeof(T));
  return out;
}
template <class T> inline T __shfl_sync(unsigned, T x, int lane) { return from<T>(exchange(x), lane & 31); }
template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return from<T>(exchange(x), (threadIdx.x & 31) ^ mask);
}
template <class T> inline T __shfl_up_sync(unsigned, T x, int delta) {
  const int lane = threadIdx.x & 31;
  return from<T>(exchange(x), lane >= delta ? lane - delta : lane);
}
EMULATED bool __any_sync(unsigned, bool x) {
  const auto all = exchange(x);
  bool any = false;
  for (int i = 0; i < 32; i++) any |= from<bool>(all, i);
  return any;
}
EMULATED bool __all_sync(unsigned, bool x) { return !__any_sync(~0u, !x); }
EMULATED unsigned __ballot_sync(unsigned, bool x) {
  const auto all = exchange(x);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= static_cast<unsigned>(from<bool>(all, i)) << i;
  return bits;
}

EMULATED unsigned __reduce_add_sync(unsigned, unsigned x) {
  const auto all = exchange(x);
  unsigned sum = 0;
  for (int i = 0; i < 32; i++) sum += from<unsigned>(all, i);
  return sum;
}
EMULATED unsigned __reduce_min_sync(unsigned, unsigned x) {
  const auto all = exchange(x);
  unsigned least = ~0u;
  for (int i = 0; i < 32; i++) least = min(least, from<unsigned>(all, i));
  return least;
}
EMULATED int __reduce_add_sync(unsigned, int x) {
  const auto all = exchange(x);
  int sum = 0;
  for (int i = 0; i < 32; i++) sum += from<int>(all, i);
  return sum;
}
EMULATED unsigned __reduce_max_sync(unsigned, unsigned x) {
  const auto all = exchange(x);
  unsigned most = 0;
  for (int i = 0; i < 32; i++) most = max(most, from<unsigned>(all, i));
  return most;
}

template <class Kernel, class Params>
void run(Kernel kernel, const Params& params, int grid_x, int grid_y, int threads, int shared_bytes) {
  struct Job { Kernel kernel; const Params* params; };
  static Job job;
  job = {kernel, &params};
  run_blocks([] { job.kernel(*job.params); }, grid_x, grid_y, threads, shared_bytes);
}

// Arithmetic

EMULATED unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
EMULATED float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
EMULATED float __int_as_float(int x) { return std::bit_cast<float>(x); }
EMULATED unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
EMULATED int __float_as_int(float x) { return std::bit_cast<int>(x); }
EMULATED int __popc(unsigned x) { return std::popcount(x); }
EMULATED int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
EMULATED int __clz(unsigned x) { return std::countl_zero(x); }
EMULATED float __fadd_rn(float a, float b) { return a + b; }
EMULATED float __fsub_rn(float a, float b) { return a - b; }
EMULATED float __fmul_rn(float a, float b) { return a * b; }
EMULATED float __fdiv_rn(float a, float b) { return a / b; }
EMULATED float __fsqrt_rn(float x) { return std::sqrt(x); }
EMULATED float __frcp_rn(float x) { return 1.f / x; }
EMULATED float __fmaf_rd(float a, float b, float c) {  // the product is exact in double; of the sum, what is too much goes
  const double product = static_cast<double>(a) * b, sum = product + c, part = sum - c;
  const double rest = (c - (sum - part)) + (product - part);  // that the sum lacks
  const float nearest = static_cast<float>(sum);
  return nearest > sum || (nearest == sum && rest < 0) ? std::nextafter(nearest, -INFINITY) : nearest;
}
EMULATED int __dp2a_lo(int a, int b, int c) {
  return c + static_cast<short>(a) * static_cast<signed char>(b) + (a >> 16) * static_cast<signed char>(b >> 8);
}
EMULATED int __dp2a_hi(int a, int b, int c) { return __dp2a_lo(a, b >> 16, c); }
EMULATED int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
  return c;
}
EMULATED float __fdividef(float a, float b) { return a / b; }
EMULATED float rsqrtf(float x) { return 1.f / std::sqrt(x); }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T atomicAdd(T* p, std::type_identity_t<T> x) { const T old = *p; *p += x; return old; }
EMULATED void __threadfence() {}
EMULATED void __threadfence_system() {}
template <class T> inline T atomicMin(T* p, T x) { const T old = *p; *p = min(old, x); return old; }
template <class T> inline T atomicMax(T* p, T x) { const T old = *p; *p = max(old, x); return old; }
template <class T> inline T atomicOr(T* p, T x) { const T old = *p; *p |= x; return old; }
template <class T> inline T atomicAnd(T* p, T x) { const T old = *p; *p &= x; return old; }
EMULATED unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= static_cast<unsigned>(both >> ((selector >> 4 * i & 7) * 8) & 0xff) << 8 * i;
  return out;
}
EMULATED unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
EMULATED unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
