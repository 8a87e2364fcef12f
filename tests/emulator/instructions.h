// What headers write as PTX: fp8.cuh, mma.cuh, warp.cuh, ring.cuh, pdl.cuh, cp_async.cuh, ldmatrix.cuh, barrier.cuh and
// wmma.cuh, in plain C++.
#pragma once
#include "cuda.h"

struct f32 { unsigned bits; };
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };

EMULATED float to_float(f32 x) { return __uint_as_float(x.bits); }
EMULATED float to_float(f16 x) {
  const unsigned sign = x.bits >> 15 << 31, size = (x.bits & 0x7fffu) << 13;
  if (size >= 31u << 23) return __uint_as_float(sign | 255u << 23 | size);  // infinity and NaN
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(size) * 0x1p112f));  // between the two biases
}
EMULATED float to_float(bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
EMULATED unsigned short bits_of(f16, float x) {  // to nearest, ties to even
  const unsigned u = __float_as_uint(x) & 0x7fffffffu, sign = __float_as_uint(x) >> 16 & 0x8000u;
  if (x != x) return 0x7fff;
  const float size = __uint_as_float(u);
  if (size >= 65520.f) return static_cast<unsigned short>(sign | 0x7c00);
  if (size < 0x1p-14f)  // the last place of a float from 0.5 on is that of a subnormal
    return static_cast<unsigned short>(sign | (__float_as_uint(size + 0.5f) - __float_as_uint(0.5f)));
  return static_cast<unsigned short>(sign | (u + 0xfff + (u >> 13 & 1) - (112u << 23)) >> 13);
}
EMULATED unsigned short bits_of(bf16, float x) {
  if (x != x) return 0x7fff;
  const unsigned u = __float_as_uint(x);
  return static_cast<unsigned short>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
template <class In> inline unsigned pair_of(In in, float first, float second) {
  return bits_of(in, first) | static_cast<unsigned>(bits_of(in, second)) << 16;
}
template <class In> inline float low(unsigned x) { return to_float(In{static_cast<unsigned short>(x)}); }
template <class In> inline float high(unsigned x) { return to_float(In{static_cast<unsigned short>(x >> 16)}); }

// Instructions that kernels have in their own text: emulator.py calls them by these names.
EMULATED unsigned short cvt_rn_f16_f32(float x) { return bits_of(f16{}, x); }
EMULATED unsigned short cvt_rn_bf16_f32(float x) { return bits_of(bf16{}, x); }
EMULATED float rsqrt_approx_ftz_f32(float x) { return 1.f / std::sqrt(x); }
EMULATED float rcp_approx_ftz_f32(float x) { return 1.f / x; }
template <class F> inline unsigned each_half(unsigned a, unsigned b, F f) {
  unsigned out = 0;
  for (int i = 0; i < 32; i += 16)
    out |= (static_cast<unsigned>(f(static_cast<short>(a >> i), static_cast<short>(b >> i))) & 0xffff) << i;
  return out;
}
EMULATED unsigned add_s16x2(unsigned a, unsigned b) { return each_half(a, b, [](int x, int y) { return x + y; }); }
EMULATED unsigned min_relu_s16x2(unsigned a, unsigned b) {
  return each_half(a, b, [](int x, int y) { return max(0, min(x, y)); });
}

template <int kBytes> struct Word { using type = unsigned; };
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <int kBytes> struct Vec {
  using word = typename Word<kBytes>::type;
  static constexpr int kWords = kBytes / sizeof(word);
  word words[kWords];
};
template <int kBytes> inline Vec<kBytes> load_once(const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % min(kBytes, 16)) std::abort();
  Vec<kBytes> out;
  std::memcpy(&out, from, kBytes);
  return out;
}
template <int kBytes> inline void store(void* to, const Vec<kBytes>& value) {
  if (reinterpret_cast<uintptr_t>(to) % min(kBytes, 16)) std::abort();
  std::memcpy(to, &value, kBytes);
}

EMULATED unsigned opaque(unsigned x) { return x; }
EMULATED void fetch_ahead(const void* from) { (void)*static_cast<const volatile char*>(from); }  // must be readable
EMULATED float exp2_of(float x) { return std::exp2(x); }
EMULATED float log2_of(float x) { return std::log2(x); }
template <class In> inline unsigned max_pair(In in, unsigned a, unsigned b) {
  return pair_of(in, std::fmax(low<In>(a), low<In>(b)), std::fmax(high<In>(a), high<In>(b)));
}
template <class In> inline unsigned larger_pair(In in, unsigned a, unsigned b) {  // any sign; NaN if one is
  const auto larger = [](float x, float y) { return x != x || y != y ? NAN : std::fmax(std::fabs(x), std::fabs(y)); };
  return pair_of(in, larger(low<In>(a), low<In>(b)), -larger(high<In>(a), high<In>(b)));
}
template <class In> inline unsigned multiply_pair(In in, unsigned a, unsigned b) {
  return pair_of(in, low<In>(a) * low<In>(b), high<In>(a) * high<In>(b));
}
EMULATED unsigned fma_pair(f16 in, unsigned a, unsigned b, unsigned c) {
  return pair_of(in, low<f16>(a) * low<f16>(b) + low<f16>(c), high<f16>(a) * high<f16>(b) + high<f16>(c));
}
EMULATED unsigned transpose8x8(unsigned x) {
  const auto all = exchange(x);
  const int lane = threadIdx.x & 31, row = lane >> 2;
  unsigned out = 0;
  for (int half = 0; half < 2; half++) {
    const int column = (lane & 3) * 2 + half;  // of the transpose: row `column` of the matrix, its element `row`
    const unsigned pair = from<unsigned>(all, column * 4 + row / 2);
    out |= (row % 2 ? pair >> 16 : pair & 0xffff) << 16 * half;
  }
  return out;
}

struct Floats { float x[16]; };  // operands of one lane
EMULATED float from(Brought all, int lane, int i) {
  float out;
  std::memcpy(&out, reinterpret_cast<const char*>(all[lane]) + 4 * i, 4);
  return out;
}
template <class In> void mma_16x8x16(In, float* c, const unsigned* a, unsigned b0, unsigned b1) {
  const unsigned pairs[6] = {a[0], a[1], a[2], a[3], b0, b1};
  Floats mine;
  for (int i = 0; i < 6; i++) mine.x[2 * i] = low<In>(pairs[i]), mine.x[2 * i + 1] = high<In>(pairs[i]);
  const auto all = exchange(mine);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int i = 0; i < 4; i++) {
    const int row = g + i / 2 * 8, column = 2 * t + i % 2;
    double sum = c[i];
    for (int k = 0; k < 16; k++)
      sum += static_cast<double>(from(all, row % 8 * 4 + k % 8 / 2, (row / 8 + k / 8 * 2) * 2 + k % 2)) *
             from(all, column * 4 + k % 8 / 2, 8 + k / 8 * 2 + k % 2);
    c[i] = static_cast<float>(sum);
  }
}

extern template void mma_16x8x16(f16, float*, const unsigned*, unsigned, unsigned);
extern template void mma_16x8x16(bf16, float*, const unsigned*, unsigned, unsigned);

template <class In> inline void mma_16x8x8(In in, float* c, unsigned a0, unsigned a1, unsigned b) {
  const unsigned a[4] = {a0, a1, 0, 0};
  mma_16x8x16(in, c, a, b, 0);
}

// An address in shared memory is its distance from the block's first byte.
EMULATED unsigned shared_address(const void* shared) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(shared) - dynamic_shared);
}

// How many of eight 16-byte accesses at once, in the worst case so far, wanted different words of one bank.
extern int most_bank_ways;
EMULATED void count_banks(const unsigned* addresses) {
  for (int bank = 0; bank < 8; bank++) {
    int ways = 0;
    for (int i = 0; i < 8; i++) {
      bool seen = addresses[i] / 16 % 8 != bank;
      for (int j = 0; j < i; j++) seen |= addresses[j] == addresses[i];
      ways += !seen;
    }
    most_bank_ways = max(most_bank_ways, ways);
  }
}

EMULATED void ldmatrix(unsigned (&out)[4], unsigned address, bool transposed) {
  if (address % 16) std::abort();
  const auto all = exchange(address);
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int i = 0; i < 4; i++) {
    unsigned rows[8];
    for (int row = 0; row < 8; row++) rows[row] = from<unsigned>(all, i * 8 + row);
    if (lane == 0) count_banks(rows);
    out[i] = 0;
    for (int half = 0; half < 2; half++) {
      const int row = transposed ? 2 * t + half : g, column = transposed ? g : 2 * t + half;
      unsigned short x;
      std::memcpy(&x, dynamic_shared + rows[row] + column * 2, 2);
      out[i] |= static_cast<unsigned>(x) << 16 * half;
    }
  }
}
EMULATED void ldmatrix_x4(unsigned (&out)[4], unsigned address) { ldmatrix(out, address, false); }
EMULATED void ldmatrix_x4_trans(unsigned (&out)[4], unsigned address) { ldmatrix(out, address, true); }

// cp.async: the bytes come at the latest moment, when the thread waits for their group; until then there are NaNs. Copies
// have no order: the last comes first, so that two to the same place do not go unnoticed.
void copy_async(unsigned to, const void* from, int bytes, bool there);
void commit_group();
void wait_for_copies(unsigned pending);
template <int kBytes, bool = false> inline void cp_async_or_zero(unsigned to, const void* from, bool there) {
  copy_async(to, from, kBytes, there);
}
template <int kPending> inline void wait_group() { wait_for_copies(kPending); }

// wmma: lane i has the eight values of half a row of a 16x16 tile, i / 2.
struct Operand { unsigned x[8]; };
struct Accumulator { float x[8]; };
EMULATED void load_operand(Operand& f, const void* from, int stride, bool columns) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 8; i++) {
    const int row = lane / 2, column = lane % 2 * 8 + i;
    f.x[i] = static_cast<const unsigned short*>(from)[columns ? column * stride + row : row * stride + column];
  }
  __syncwarp();
}
template <class In> inline void load_a_row(Operand& f, const void* from, int stride) { load_operand(f, from, stride, false); }
template <class In> inline void load_b_row(Operand& f, const void* from, int stride) { load_operand(f, from, stride, false); }
template <class In> inline void load_b_col(Operand& f, const void* from, int stride) { load_operand(f, from, stride, true); }
EMULATED void load_sum(Accumulator& f, const float* from, int stride) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 8; i++) f.x[i] = from[lane / 2 * stride + lane % 2 * 8 + i];
  __syncwarp();
}
EMULATED void store_sum(float* to, const Accumulator& f, int stride) {
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 8; i++) to[lane / 2 * stride + lane % 2 * 8 + i] = f.x[i];
  __syncwarp();
}
template <class In, bool> void multiply(Accumulator& c, const Operand& a, const Operand& b) {
  Floats mine;
  for (int i = 0; i < 8; i++) mine.x[i] = low<In>(a.x[i]), mine.x[8 + i] = low<In>(b.x[i]);
  const auto all = exchange(mine);
  const int lane = threadIdx.x & 31;
  for (int i = 0; i < 8; i++) {
    double sum = c.x[i];
    for (int k = 0; k < 16; k++)
      sum += static_cast<double>(from(all, lane / 2 * 2 + k / 8, k % 8)) * from(all, k * 2 + lane % 2, 8 + i);
    c.x[i] = static_cast<float>(sum);
  }
}

extern template void multiply<f16, false>(Accumulator&, const Operand&, const Operand&);
extern template void multiply<bf16, false>(Accumulator&, const Operand&, const Operand&);
extern template void multiply<f16, true>(Accumulator&, const Operand&, const Operand&);
extern template void multiply<bf16, true>(Accumulator&, const Operand&, const Operand&);

constexpr bool kOverlaps = true;
EMULATED void wait_for_previous() {}
EMULATED void release_next() {}

template <int kStages>
struct Ring {
  int expected[kStages] = {}, came[kStages] = {};
  explicit Ring(unsigned long long*) {}
  static bool mine() { return (threadIdx.x & 31) == 0; }
  void begin(int stage, int bytes) { expected[stage] = bytes; came[stage] = 0; }
  void copy(int stage, void* to, const void* from, int bytes) {
    if (bytes % 16 || reinterpret_cast<uintptr_t>(to) % 16 || reinterpret_cast<uintptr_t>(from) % 16) std::abort();
    std::memcpy(to, from, bytes);
    came[stage] += bytes;
  }
  void copy_of_lane(int stage, void* to, const void* from, int bytes) { copy(stage, to, from, bytes); }
  void commit() {}
  void wait(int stage, int) {
    const auto all = exchange(came[stage]);
    int sum = 0;
    for (int i = 0; i < 32; i++) sum += ::from<int>(all, i);
    if (mine() && sum != expected[stage]) std::abort();  // the barrier would wait for ever, or not long enough
    came[stage] = 0;
  }
  static void fence() {}
};
