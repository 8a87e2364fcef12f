// CUDA C++ as plain C++: every thread of a block is a fibre of one OS thread; they take turns where CUDA makes them wait for
// each other. For tests without a GPU; it shows wrong arithmetic and wrong addresses, not races.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 900

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

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
inline unsigned char* dynamic_shared;
inline unsigned dynamic_bytes;  // that the launch asked for

// Fibres

struct Meeting {  // of those who wait for each other, with room for what they bring
  int size = 0, arrived = 0;
  unsigned long long number = 0;
  uint64_t brought[2][32][8];
};

struct Block {
  std::vector<bool> done;
  std::vector<Meeting> warps;
  Meeting all, some[16];  // by the number of their barrier
  int current = 0;
};
inline Block* block;
inline long blocks_begun = 0;

// A thread's stack and where it waits; kept from launch to launch, and left by longjmp, which makes no system call.
struct Fibre {
  std::unique_ptr<char[]> stack;
  ucontext_t first;
  jmp_buf wait;
  bool begun = false;
};
inline std::vector<std::unique_ptr<Fibre>> fibres;
inline jmp_buf scheduler;
inline void (*thread_body)();

inline void yield() {
  if (!_setjmp(fibres[block->current]->wait)) _longjmp(scheduler, 1);
}

inline void live_as_fibre() {
  for (;;) {
    thread_body();
    block->done[block->current] = true;
    yield();
  }
}

inline void reserve_fibres(int threads) {
  constexpr size_t kStack = 256 << 10;
  while (fibres.size() < static_cast<size_t>(threads)) {
    auto& fibre = *fibres.emplace_back(std::make_unique<Fibre>());
    fibre.stack.reset(new char[kStack]);
    getcontext(&fibre.first);
    fibre.first.uc_stack.ss_sp = fibre.stack.get();
    fibre.first.uc_stack.ss_size = kStack;
    makecontext(&fibre.first, live_as_fibre, 0);
  }
}

inline void resume(Fibre& fibre) {  // until it yields
  if (_setjmp(scheduler)) return;
  if (fibre.begun) _longjmp(fibre.wait, 1);
  fibre.begun = true;
  setcontext(&fibre.first);
}

inline int meet(Meeting& m) {  // the half of `brought` that belongs to this meeting
  const unsigned long long number = m.number;
  if (++m.arrived == m.size) {
    m.arrived = 0;
    m.number++;
  } else {
    while (m.number == number) yield();
  }
  return number & 1;
}

inline Meeting& my_warp() { return block->warps[threadIdx.x >> 5]; }

template <class T>
inline const uint64_t (*exchange(const T& mine))[8] {
  static_assert(sizeof(T) <= 64);
  Meeting& m = my_warp();
  std::memcpy(m.brought[m.number & 1][threadIdx.x & 31], &mine, sizeof(T));
  return m.brought[meet(m)];
}
template <class T>
inline T from(const uint64_t (*all)[8], int lane) {
  T out;
  std::memcpy(&out, all[lane], sizeof(T));
  return out;
}

inline void __syncwarp() { meet(my_warp()); }
inline void __syncthreads() { meet(block->all); }
inline void sync_some(int number, int threads) {
  block->some[number].size = threads;
  meet(block->some[number]);
}
template <class T> inline T __shfl_sync(unsigned, T x, int lane) { return from<T>(exchange(x), lane & 31); }
template <class T> inline T __shfl_xor_sync(unsigned, T x, int mask) {
  return from<T>(exchange(x), (threadIdx.x & 31) ^ mask);
}
template <class T> inline T __shfl_up_sync(unsigned, T x, int delta) {
  const int lane = threadIdx.x & 31;
  return from<T>(exchange(x), lane >= delta ? lane - delta : lane);
}
inline bool __any_sync(unsigned, bool x) {
  const auto all = exchange(x);
  bool any = false;
  for (int i = 0; i < 32; i++) any |= from<bool>(all, i);
  return any;
}
inline bool __all_sync(unsigned, bool x) { return !__any_sync(~0u, !x); }
inline unsigned __ballot_sync(unsigned, bool x) {
  const auto all = exchange(x);
  unsigned bits = 0;
  for (int i = 0; i < 32; i++) bits |= static_cast<unsigned>(from<bool>(all, i)) << i;
  return bits;
}

inline unsigned __reduce_add_sync(unsigned, unsigned x) {
  const auto all = exchange(x);
  unsigned sum = 0;
  for (int i = 0; i < 32; i++) sum += from<unsigned>(all, i);
  return sum;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
  const auto all = exchange(x);
  unsigned most = 0;
  for (int i = 0; i < 32; i++) most = std::max(most, from<unsigned>(all, i));
  return most;
}

template <class Kernel, class Params>
void run(Kernel kernel, const Params& params, int grid_x, int grid_y, int threads, int shared_bytes) {
  gridDim = {grid_x, grid_y, 1};
  blockDim = {threads, 1, 1};
  reserve_fibres(threads);
  static std::vector<unsigned char> shared;
  struct Job { Kernel kernel; const Params* params; };
  static Job job;
  job = {kernel, &params};
  thread_body = [] { job.kernel(*job.params); };
  const bool backwards = std::getenv("EMULATE_BACKWARDS");  // blocks come in any order on a GPU
  for (int y = 0; y < grid_y; y++)
    for (int at = 0; at < grid_x; at++) {
      const int x = backwards ? grid_x - 1 - at : at;
      shared.assign(shared_bytes + 1024, 0xff);
      dynamic_bytes = shared_bytes;
      dynamic_shared = shared.data() + (1024 - reinterpret_cast<uintptr_t>(shared.data()) % 1024) % 1024;
      Block here;
      block = &here;
      blocks_begun++;
      here.done.assign(threads, false);
      here.warps.resize((threads + 31) / 32);
      for (auto& warp : here.warps) warp.size = 32;
      here.all.size = threads;
      blockIdx = {x, y, 0};
      for (int left = threads, idle = 0; left;) {
        left = 0;
        for (int i = 0; i < threads; i++) {
          if (here.done[i]) continue;
          here.current = i;
          threadIdx = {i, 0, 0};
          resume(*fibres[i]);
          left += !here.done[i];
        }
        if (++idle > 50'000'000) std::abort();  // somebody waits for a lane that has gone
      }
    }
}

// Arithmetic

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(unsigned x) { return x ? std::countr_zero(x) + 1 : 0; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fmaf_rd(float a, float b, float c) {  // the product is exact in double; of the sum, what is too much goes
  const long double sum = static_cast<long double>(static_cast<double>(a) * b) + c;
  const float nearest = static_cast<float>(sum);
  return nearest > sum ? std::nextafter(nearest, -INFINITY) : nearest;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1.f / std::sqrt(x); }
using std::max;
using std::min;
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T atomicAdd(T* p, std::type_identity_t<T> x) { const T old = *p; *p += x; return old; }
inline void __threadfence() {}
inline void __threadfence_system() {}
template <class T> inline T atomicMin(T* p, T x) { const T old = *p; *p = std::min(old, x); return old; }
template <class T> inline T atomicMax(T* p, T x) { const T old = *p; *p = std::max(old, x); return old; }
template <class T> inline T atomicOr(T* p, T x) { const T old = *p; *p |= x; return old; }
template <class T> inline T atomicAnd(T* p, T x) { const T old = *p; *p &= x; return old; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= static_cast<unsigned>(both >> ((selector >> 4 * i & 7) * 8) & 0xff) << 8 * i;
  return out;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
