// Transformed rows of a tile to codes and scales in the page: those of quant/reference.py, bit for bit.
#pragma once
#include "fragments.cuh"
#include "numbers.cuh"
#include "quantize_rows.cuh"
#include "rounded.cuh"
#include "warp.cuh"

template <int kBits> __device__ __forceinline__ constexpr float gaussian_step() {
  return kBits == 2 ? 0.9957f : kBits == 3 ? 0.586f : 0.3352f;
}

// K_GAIN and V_GAIN of quant/reference.py.
template <int kBits, bool kIsV> __device__ __forceinline__ constexpr float gain_of() {
  if (kIsV) return kBits == 2 ? 1.0995f : kBits == 3 ? 1.0291f : kBits == 4 ? 1.0087f : 1.f;
  return kBits == 2 ? 1.0653f : kBits == 3 ? 1.0193f : kBits == 4 ? 1.0058f : 1.f;
}

// Both 16-bit halves, signed, plus those of `by`, clamped to 0 .. most.
__device__ __forceinline__ unsigned add_and_clamp(unsigned x, unsigned by, int most) {
  unsigned out;
#if __CUDA_ARCH__ >= 900
  asm("add.s16x2 %0,%1,%2;" : "=r"(out) : "r"(x), "r"(by));
  asm("min.relu.s16x2 %0,%1,%2;" : "=r"(out) : "r"(out), "r"(most * 0x10001u));
#else
  const int low = static_cast<short>(x) + static_cast<short>(by);
  const int high = (static_cast<int>(x) >> 16) + (static_cast<int>(by) >> 16);
  out = static_cast<unsigned>(max(0, min(low, most)) | max(0, min(high, most)) << 16);
#endif
  return out;
}

// Tokens in a tile's fragments. A lane has values of several: K: tokens g + 8 (r % 2), shared by the 4 lanes of equal g;
// V: tokens 2t + half + 8 (r / 2), shared by the 8 lanes of equal t. Reductions leave each lane with one token;
// `spread` sends its result back to all lanes.
template <bool kIsV> struct TileTokens {
  static constexpr int kRows = kIsV ? 4 : 2;
  static __device__ __forceinline__ constexpr int row(int r, int half) { return kIsV ? (r >> 1) * 2 + half : r & 1; }
  // The lane's own token in the tile, and whether this lane writes it.
  static __device__ __forceinline__ int token() {
    const int lane = threadIdx.x & 31;
    return kIsV ? 2 * (lane & 3) + (lane >> 4) + 8 * (lane >> 2 & 1) : (lane >> 2) + 8 * (lane >> 1 & 1);
  }
  static __device__ __forceinline__ bool writes() { return !(threadIdx.x & (kIsV ? 8 : 1)); }
  // Values of dims 1 apart (V), 4 and 2 apart, combined in this order.
  template <class T, class F>
  static __device__ __forceinline__ T reduce(const T (&x)[kRows], F combine) {
    const int lane = threadIdx.x & 31;
    if constexpr (kIsV) {
      const bool upper = lane & 4, odd = lane & 16;
      const T a = combine(upper ? x[2] : x[0], __shfl_xor_sync(~0u, upper ? x[0] : x[2], 4));
      const T b = combine(upper ? x[3] : x[1], __shfl_xor_sync(~0u, upper ? x[1] : x[3], 4));
      const T out = combine(odd ? b : a, __shfl_xor_sync(~0u, odd ? a : b, 16));
      return combine(out, __shfl_xor_sync(~0u, out, 8));
    } else {
      const bool odd = lane & 2;
      const T out = combine(odd ? x[1] : x[0], __shfl_xor_sync(~0u, odd ? x[0] : x[1], 2));
      return combine(out, __shfl_xor_sync(~0u, out, 1));
    }
  }
  template <class T>
  static __device__ __forceinline__ void spread(T own, T (&x)[kRows]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kRows; i++)
      x[i] = __shfl_sync(~0u, own, kIsV ? (i >> 1) * 4 + (i & 1) * 16 + (lane & 3) : (lane & 28) + i * 2);
  }
};

// A token's step. `measure`: the sum of squares, or for 8 bit the largest magnitude.
template <int kBits, int kDim>
__device__ __forceinline__ float step_of(float measure) {
  if constexpr (kBits == 8) return __fmul_rn(measure, 2.f / 255.f);
  constexpr float kShare = 1.f / kDim;
  float mean = measure * kShare;
  if constexpr (kDim & (kDim - 1)) mean = fmaf(fmaf(-mean, static_cast<float>(kDim), measure), kShare, mean);
  return __fmul_rn(square_root(fmaxf(mean, 1e-30f)), gaussian_step<kBits>());
}

// Sums for the fit of a token's scale: values in 1/256 steps times levels, and levels squared. All are integers, so their order
// does not matter. Levels are signed bytes: 2^(8 - kBits) times the level, or for 8 bit the level less 1/2.
template <int kBits, int kSteps, bool kIsV>
struct Fit {
  using G = TileTokens<kIsV>;
  static constexpr unsigned kOnes = 0x01010101u;
  static constexpr float kLevel = kBits == 8 ? 2 : 1 << (8 - kBits);  // of the sums, in `ratio`
  int dot[G::kRows] = {}, square[G::kRows] = {};
  int values[G::kRows] = {}, levels[G::kRows] = {};  // 8 bit: sums of values and of levels
  unsigned before[2] = {};                           // V: levels of the last step

  static __device__ __forceinline__ unsigned level_bytes(unsigned codes) {
    if constexpr (kBits == 8) return codes ^ 128 * kOnes;
    else return codes << (8 - kBits) ^ (128 + (1 << (7 - kBits))) * kOnes;
  }

  __device__ __forceinline__ void add_squares(int row, unsigned bytes) {
    square[row] = __dp4a(static_cast<int>(bytes), static_cast<int>(bytes), square[row]);
    if constexpr (kBits == 8) levels[row] = __dp4a(static_cast<int>(bytes), static_cast<int>(kOnes), levels[row]);
  }

  // Two pairs of values of step s, and their codes. A pair is of one token: both pairs of K's row j, V's rows 2j and 2j + 1.
  __device__ __forceinline__ void add(int s, int j, const unsigned (&z)[2], unsigned codes) {
    const int first = kIsV ? 2 * j : j, second = kIsV ? 2 * j + 1 : j;
    const int x = static_cast<int>(z[0]), y = static_cast<int>(z[1]);
    const unsigned bytes = level_bytes(codes);
    dot[first] = __dp2a_lo(x, static_cast<int>(bytes), dot[first]);
    dot[second] = __dp2a_hi(y, static_cast<int>(bytes), dot[second]);
    if constexpr (kBits == 8) {
      values[first] = __dp2a_lo(x, static_cast<int>(kOnes), values[first]);
      values[second] = __dp2a_lo(y, static_cast<int>(kOnes), values[second]);
    }
    if constexpr (!kIsV) {
      add_squares(j, bytes);
    } else if (s % 2 == 0 && s + 1 < kSteps) {
      before[j] = bytes;
    } else {  // two steps of each token
      const unsigned other = s % 2 ? before[j] : 0;
      add_squares(first, __byte_perm(bytes, other, 0x5410));
      add_squares(second, __byte_perm(bytes, other, 0x7632));
    }
  }

  // For the lane's own token: the first sum divided by the second. Its unit is kLevel / 256 steps.
  __device__ __forceinline__ float ratio() {
    if constexpr (kBits == 8)
#pragma unroll
      for (int i = 0; i < G::kRows; i++) {
        dot[i] = 2 * dot[i] + values[i];
        square[i] = 4 * (square[i] + levels[i]);
      }
    constexpr auto sum = [](int a, int b) { return a + b; };
    const int all = G::reduce(dot, sum), squares = G::reduce(square, sum) + (kBits == 8 ? 16 * kSteps : 0);
    return divide(static_cast<float>(all), static_cast<float>(squares));
  }
};

// Two values of a token in 1/256 steps, as signed halves. `factor`: 256 / step.
__device__ __forceinline__ unsigned in_steps(float first, float second, float factor) {
  return __byte_perm(__float_as_uint(__fmaf_rd(first, factor, kMagic)), __float_as_uint(__fmaf_rd(second, factor, kMagic)),
                     0x5410);
}

// Transformed rows to codes, and the sums for the fit of scales. `step`: of the lane's own token.
template <int kBits, int kSteps, bool kIsV, class F>
__device__ __forceinline__ void encode(const Tile<kSteps>& f, float step, Codes<kBits, kSteps>& codes, F& fit) {
  using G = TileTokens<kIsV>;
  constexpr int kHalf = 128 << kBits;  // half of all levels, in 1/256 steps
  // The step's sign is zero: a sum that the compiler keeps in a register. A constant is moved into one at every use.
  const unsigned half_of_all = kHalf * 0x10001u + (__float_as_uint(step) >> 31);
  float inverse[G::kRows];
  G::spread(256.f * reciprocal(step), inverse);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    unsigned bytes[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int a = kIsV ? 2 * j : j, b = kIsV ? 2 * j + 1 : j + 2;  // registers with values of the same tokens
      unsigned z[2], shifted[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        z[half] = in_steps(f[s][a][half], f[s][b][half], inverse[G::row(a, half)]);
        shifted[half] = kBits == 8 ? z[half] : add_and_clamp(z[half], half_of_all, 2 * kHalf - 1);
      }
      bytes[j] = __byte_perm(shifted[0], shifted[1], 0x7531) ^ (kBits == 8 ? 0x80808080u : 0);
      fit.add(s, j, z, bytes[j]);
    }
    if constexpr (kIsV) codes.set(s, __byte_perm(bytes[0], bytes[1], 0x6240), __byte_perm(bytes[0], bytes[1], 0x7351));
    else codes.set(s, bytes[0], bytes[1]);
  }
}

// The direction of K (`aim` in quant/reference.py), if one is given, as lay_direction leaves it in shared memory.
// Direction<false>: of sides that never have one, without any code for it.
template <bool kCan>
struct Direction {
  static constexpr bool kAny = true;
  const uint4* weights = nullptr;
  bool given = false;
};
template <>
struct Direction<false> {
  static constexpr bool kAny = false;
  __device__ __forceinline__ Direction(const uint4* = nullptr, bool = false) {}
};

__device__ __forceinline__ constexpr bool has_direction(int bits, bool is_v) { return !is_v && bits != 8; }

// Weights for lanes of equal t, step by step: x and y are those of dims 2t, 2t + 8 and of 2t + 1, 2t + 9, as a sum of the first
// and 65536 times the second; z has these four as bytes; w is the sum of all weights.
template <int kSteps>
__device__ __forceinline__ void lay_direction(uint4* to, const signed char* from) {
  constexpr int kParts = (4 * kSteps + 31) / 32;
  constexpr auto both = [](unsigned low, unsigned high) {
    return static_cast<unsigned>(static_cast<signed char>(low) + static_cast<signed char>(high) * 65536);
  };
  const int lane = threadIdx.x & 31;
  uint4 x[kParts];
  int sum = 0;
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    const int i = 32 * part + lane;
    if (i >= 4 * kSteps) continue;
    const signed char* pair = from + i / 4 * 16 + i % 4 * 2;
    const unsigned first = *reinterpret_cast<const unsigned short*>(pair);
    const unsigned second = *reinterpret_cast<const unsigned short*>(pair + 8);
    x[part].x = both(first, second);
    x[part].y = both(first >> 8, second >> 8);
    x[part].z = __byte_perm(first, second, 0x5140);
    sum = __dp4a(static_cast<int>(x[part].z), 0x01010101, sum);
  }
  sum = __reduce_add_sync(~0u, sum);
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    const int i = 32 * part + lane;
    if (i >= 4 * kSteps) continue;
    x[part].w = static_cast<unsigned>(sum);
    to[i] = x[part];
  }
  __syncwarp();
}

// `encode` of K with a direction. Both halves of a register are shifted by one product: neither leaves 1 .. 32767. Rows whose
// codes are kept stay as they are: their values are half a code from the next threshold, twice as far as any shift.
template <int kBits, int kSteps, class F>
__device__ __forceinline__ void encode_along(const Tile<kSteps>& f, float step, const uint4* weights,
                                             Codes<kBits, kSteps>& codes, F& fit) {
  using G = TileTokens<false>;
  constexpr int kHalf = 128 << kBits;  // half of all levels, in 1/256 steps
  constexpr int kPerGain = static_cast<int>(4096.f / gain_of<kBits, false>() + 0.5f);
  constexpr auto sum_of = [](int a, int b) { return a + b; };
  // Bytes with a code in the highest five bits; the sum of codes times weights is 1/8 of that of these.
  constexpr auto high_bytes = [](unsigned x, unsigned y) { return __byte_perm(x, y, 0x7531) & 0xf8f8f8f8u; };
  const uint4* own = weights + (threadIdx.x & 3);
  unsigned z[kSteps][2][2], base[kSteps][2][2];
  int along[2] = {}, sum[2] = {}, shift[2];
  {
    float inverse[2];
    G::spread(256.f * reciprocal(step), inverse);
    const unsigned low_end = (kHalf - 64) * 0x10001u + (__float_as_uint(step) >> 31);  // in a register, see `encode`
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const uint4 w = own[4 * s];
#pragma unroll
      for (int j = 0; j < 2; j++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          z[s][j][half] = in_steps(f[s][j][half], f[s][j + 2][half], inverse[j]);
          base[s][j][half] = add_and_clamp(z[s][j][half], low_end, 2 * kHalf - 128) * 8 + 512 * 0x10001u;
        }
        along[j] = __dp2a_lo(static_cast<int>(z[s][j][0]), static_cast<int>(w.z), along[j]);
        along[j] = __dp2a_hi(static_cast<int>(z[s][j][1]), static_cast<int>(w.z), along[j]);
        sum[j] = __dp4a(static_cast<int>(high_bytes(base[s][j][0], base[s][j][1])), static_cast<int>(w.z), sum[j]);
      }
    }
  }
  const int of_row = static_cast<int>(static_cast<i64>(G::reduce(along, sum_of)) * kPerGain >> 12);
  const int wanted = of_row + (kHalf - 128) * static_cast<int>(own[0].w);
  int rest = wanted - 32 * G::reduce(sum, sum_of), least = abs(rest), own_shift = 0, best = 0;
#pragma unroll 1
  for (int size = 8; size; size >>= 1) {
    own_shift += rest > 0 ? size : -size;
    G::spread(own_shift, shift);
    sum[0] = sum[1] = 0;
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      const uint4 w = own[4 * s];
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const unsigned x = base[s][j][0] + w.x * shift[j], y = base[s][j][1] + w.y * shift[j];
        sum[j] = __dp4a(static_cast<int>(high_bytes(x, y)), static_cast<int>(w.z), sum[j]);
      }
    }
    rest = wanted - 32 * G::reduce(sum, sum_of);
    if (abs(rest) < least) {
      least = abs(rest);
      best = own_shift;
    }
  }
  G::spread(best, shift);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    const uint4 w = own[4 * s];
    unsigned bytes[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const unsigned x = base[s][j][0] + w.x * shift[j], y = base[s][j][1] + w.y * shift[j];
      bytes[j] = high_bytes(x, y) >> 3;
      fit.add(s, j, z[s][j], bytes[j]);
    }
    codes.set(s, bytes[0], bytes[1]);
  }
}

// term(s) + term(s + kWidth) + term(s + 2 kWidth) + .., up to term(kSteps - 1): the second half is added to the first until one
// is left.
template <int kWidth, int kSteps, class Term>
__device__ __forceinline__ float sum_steps(int s, const Term& term) {
  if constexpr (kWidth >= kSteps) {
    return term(s);
  } else {
    const float first = sum_steps<2 * kWidth, kSteps>(s, term);
    return s + kWidth < kSteps ? __fadd_rn(first, sum_steps<2 * kWidth, kSteps>(s + kWidth, term)) : first;
  }
}

// Measure for the step of the lane's own token: the sum of squares, in the order of row_sum of quant/reference.py, or for 8 bit
// the largest magnitude.
template <int kBits, int kSteps, bool kIsV>
__device__ __forceinline__ float measure_rows(const Tile<kSteps>& f) {
  using G = TileTokens<kIsV>;
  float part[G::kRows] = {};
  if constexpr (kBits == 8) {
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int i = 0; i < 8; i++) part[G::row(i >> 1, i & 1)] = fmaxf(part[G::row(i >> 1, i & 1)], fabsf(f[s][i >> 1][i & 1]));
    return G::reduce(part, [](float a, float b) { return fmaxf(a, b); });
  } else {
    float sums[2][2];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        sums[j][half] = sum_steps<1, kSteps>(0, [&](int s) {
          const float x = f[s][kIsV ? 2 * j : j][half], y = f[s][kIsV ? 2 * j + 1 : j + 2][half];
          return __fadd_rn(__fmul_rn(x, x), __fmul_rn(y, y));
        });
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if constexpr (kIsV) {
        part[2 * j] = sums[j][0];
        part[2 * j + 1] = sums[j][1];
      } else {
        part[j] = __fadd_rn(sums[j][0], sums[j][1]);
      }
    }
    return G::reduce(part, [](float a, float b) { return __fadd_rn(a, b); });
  }
}

// Tokens of a tile that are written: all of them, or `count` from `first` on.
struct AllTokens {
  static constexpr bool kAll = true;
};
struct SomeTokens {
  static constexpr bool kAll = false;
  int first, count;
  __device__ __forceinline__ bool has(int token) const {
    return static_cast<unsigned>(token - first) < static_cast<unsigned>(count);
  }
};

// Writes the codes of a tile's tokens to its page.
template <int kTiles, bool kIsV, int kBits, int kSteps, class Tokens>
__device__ __forceinline__ void write_codes(const Codes<kBits, kSteps>& codes, unsigned char* to, int tile, const Tokens& tokens) {
  if constexpr (Tokens::kAll) {
    codes.template flush<kTiles>(to, tile);
  } else {
    if (Codes<kBits, kSteps>::kWhole && tokens.count == 16) {
      codes.template flush<kTiles>(to, tile);
      return;
    }
    constexpr unsigned kMost = (1u << kBits) - 1;
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    Codes<kBits, kSteps> mask;
    unsigned fields[2] = {};  // registers 0 and 2, 1 and 3; each with both halves
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int r = i >> 1, half = i & 1, token = kIsV ? 2 * t + half + 8 * (r >> 1) : g + 8 * (r & 1);
      if (tokens.has(token)) fields[r & 1] |= kMost << ((r >> 1) * 8 + half * 16);
    }
#pragma unroll
    for (int s = 0; s < kSteps; s++) mask.set(s, fields[0], fields[1]);
    codes.template merge<kTiles>(to, tile, mask);
  }
}

// Transformed rows to codes and scales in the page. `kept`: a scale of the lane's own token that is kept, and with it the codes
// that the row came from (if it is zero and so is the row, they become the middle); negative if there is none. `exponent`: the
// row of the lane's own token is 2^-exponent times as long.
template <int kSteps, int kBits, int kTiles, bool kIsV, bool kRotate, class Tokens = AllTokens, class Along = Direction<false>>
__device__ __forceinline__ void write_side(const Tile<kSteps>& f, int exponent, int kept, unsigned char* to, int tile,
                                           unsigned char* scales, const Tokens& tokens = Tokens{},
                                           const Along& direction = Along{}) {
  using G = TileTokens<kIsV>;
  using Sums = Fit<kBits, kSteps, kIsV>;
  constexpr float kFactor = rotation_factor<kSteps, kRotate>(), kGain = kFactor * gain_of<kBits, kIsV>() * (Sums::kLevel / 256);
  const int token = G::token();
  float step = fmaxf(step_of<kBits, 16 * kSteps>(measure_rows<kBits, kSteps, kIsV>(f)),
                     kSmallestStep / kFactor * power_of_two(-exponent));
  if (kept >= 0) step = fmaxf(to_float(f16{static_cast<unsigned short>(kept)}), kSmallestStep) / kFactor;
  Codes<kBits, kSteps> codes;
  Sums fit;
  if constexpr (Along::kAny) {
    if (direction.given) encode_along<kBits, kSteps>(f, step, direction.weights, codes, fit);
    else encode<kBits, kSteps, kIsV>(f, step, codes, fit);
  } else {
    encode<kBits, kSteps, kIsV>(f, step, codes, fit);
  }
  unsigned short scale = scale_of(__fmul_rn(fit.ratio(), __fmul_rn(step, kGain)) * power_of_two(exponent));
  if (kept >= 0) scale = static_cast<unsigned short>(kept);
  bool writes = G::writes();
  if constexpr (!Tokens::kAll) writes = writes && tokens.has(token);
  if (writes) reinterpret_cast<unsigned short*>(scales)[scale_index(16 * tile + token, kIsV)] = scale;
  write_codes<kTiles, kIsV>(codes, to, tile, tokens);
}
