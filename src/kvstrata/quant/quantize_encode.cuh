// Rotated rows of a tile to codes and scales in the page; the arithmetic of quant/reference.py.
#pragma once
#include "fragments.cuh"
#include "numbers.cuh"
#include "quantize_rows.cuh"
#include "warp.cuh"

template <int kBits> __device__ __forceinline__ constexpr float gaussian_step() {
  return kBits == 2 ? 0.9957f : kBits == 3 ? 0.586f : 0.3352f;
}

// K_GAIN and V_GAIN of quant/reference.py.
template <int kBits, bool kIsV> __device__ __forceinline__ constexpr float gain_of() {
  if (kIsV) return kBits == 2 ? 1.0995f : kBits == 3 ? 1.0291f : kBits == 4 ? 1.0087f : 1.f;
  return kBits == 2 ? 1.0653f : kBits == 3 ? 1.0193f : kBits == 4 ? 1.0058f : 1.f;
}

// (levels - 1) / 2 * 2^-9 in fp16.
template <int kBits> __device__ __forceinline__ constexpr unsigned middle_level() {
  return kBits == 2 ? 0x1a00u : kBits == 3 ? 0x1f00u : kBits == 4 ? 0x2380u : 0x33f8u;
}

// Both 16-bit halves clamped to 0 .. largest.
__device__ __forceinline__ unsigned clamp_halves(unsigned x, int largest) {
  unsigned out;
#if __CUDA_ARCH__ >= 900
  asm("min.relu.s16x2 %0,%1,%2;" : "=r"(out) : "r"(x), "r"(largest * 0x10001));
#else
  const int low = static_cast<short>(x), high = static_cast<int>(x) >> 16;
  out = static_cast<unsigned>(max(0, min(low, largest)) | max(0, min(high, largest)) << 16);
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
    return kIsV ? 2 * (lane & 3) + (lane >> 3 & 1) + 8 * (lane >> 4) : (lane >> 2) + 8 * (lane >> 1 & 1);
  }
  static __device__ __forceinline__ bool writes() { return !(threadIdx.x & (kIsV ? 4 : 1)); }
  template <class F>
  static __device__ __forceinline__ float reduce(const float (&x)[kRows], F combine) {
    const int lane = threadIdx.x & 31;
    if constexpr (kIsV) {
      const bool upper = lane & 16, odd = lane & 8;
      const float a = combine(upper ? x[2] : x[0], __shfl_xor_sync(~0u, upper ? x[0] : x[2], 16));
      const float b = combine(upper ? x[3] : x[1], __shfl_xor_sync(~0u, upper ? x[1] : x[3], 16));
      const float out = combine(odd ? b : a, __shfl_xor_sync(~0u, odd ? a : b, 8));
      return combine(out, __shfl_xor_sync(~0u, out, 4));
    } else {
      const bool odd = lane & 2;
      const float out = combine(odd ? x[1] : x[0], __shfl_xor_sync(~0u, odd ? x[0] : x[1], 2));
      return combine(out, __shfl_xor_sync(~0u, out, 1));
    }
  }
  static __device__ __forceinline__ void spread(float own, float (&x)[kRows]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kRows; i++) x[i] = __shfl_sync(~0u, own, kIsV ? i * 8 + (lane & 3) : (lane & 28) + i * 2);
  }
};

__device__ __forceinline__ float sum_of(float a, float b) { return a + b; }
// For magnitudes, compared as integers: a NaN counts as the largest.
__device__ __forceinline__ float larger(float a, float b) {
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
}

// Correctly rounded well within the normal range, without the branch that other values need.
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

// A token's step. `measure`: the sum of squares, or for 8 bit the largest magnitude.
template <int kBits, int kDim>
__device__ __forceinline__ float step_of(float measure) {
  if constexpr (kBits == 8) return __fmul_rn(measure, 2.f / 255.f);
  constexpr float kShare = 1.f / kDim;
  float mean = measure * kShare;
  if constexpr (kDim & (kDim - 1)) mean = fmaf(fmaf(-mean, static_cast<float>(kDim), measure), kShare, mean);
  return __fmul_rn(square_root(fmaxf(mean, 1e-20f)), gaussian_step<kBits>());
}

// Sums for the fit of a token's scale: its values times their levels, and levels squared. Levels are pairs of
// fp16, times 2^-9.
template <int kBits, int kSteps, bool kIsV>
struct Fit {
  using G = TileTokens<kIsV>;
  // Squares are summed in fp16, exactly: as multiples of 2^-20 below 2048 of them.
  static constexpr bool kHalves = kBits < 8;
  static constexpr int kLargestSquare = ((1 << kBits) - 1) * ((1 << kBits) - 1);
  static constexpr int kSums = kHalves ? (2 * kSteps * kLargestSquare + 2047) / 2048 : 1;
  float dot[G::kRows] = {}, square[G::kRows] = {};
  unsigned squares[kSums][2] = {};

  __device__ __forceinline__ void add(int s, const float (&f)[4][2], const unsigned (&levels)[4]) {
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int i = G::row(r, 0), j = G::row(r, 1);
      const float a = to_float(f16{static_cast<unsigned short>(levels[r])});
      const float b = to_float(f16{static_cast<unsigned short>(levels[r] >> 16)});
      dot[i] += f[r][0] * a;
      dot[j] += f[r][1] * b;
      if constexpr (kHalves) {
        unsigned& sum = squares[s * kSums / kSteps][kIsV ? r >> 1 : r & 1];
        sum = fma_pair(f16{}, levels[r], levels[r], sum);
      } else {
        square[i] += a * a;
        square[j] += b * b;
      }
    }
  }

  // For the lane's own token, times 2^-9.
  __device__ __forceinline__ float scale() {
    if constexpr (kHalves)
#pragma unroll
      for (int n = 0; n < kSums; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          square[kIsV ? 2 * i : i] += to_float(f16{static_cast<unsigned short>(squares[n][i])});
          square[kIsV ? 2 * i + 1 : i] += to_float(f16{static_cast<unsigned short>(squares[n][i] >> 16)});
        }
    return __fdividef(G::reduce(dot, sum_of), G::reduce(square, sum_of));
  }
};

// The lane that has element (g, g) of a product of 8 tokens with themselves; it is the lane's first element, or its second
// if g is odd.
__device__ __forceinline__ int diagonal_lane(int token) { return token % 8 * 4 + token % 8 / 2; }

// Same for K on the tensor cores: rows of A are the values of 8 tokens, as fp16, and their levels; columns of B are
// their levels. The results are on two diagonals, in one lane of every four: for tokens g and g + 8.
struct FitByProducts {
  float c[2][4] = {};

  __device__ __forceinline__ void add(int, const float (&f)[4][2], const unsigned (&levels)[4]) {
#pragma unroll
    for (int r = 0; r < 4; r++)
      mma_16x8x8(f16{}, c[r & 1], pair_of(f16{}, f[r][0], f[r][1]), levels[r], levels[r]);
  }
  static __device__ __forceinline__ bool writes() {
    const int lane = threadIdx.x & 31;
    return lane == diagonal_lane(lane >> 2);
  }
  __device__ __forceinline__ float scale(int i) const {
    const bool odd = threadIdx.x & 4;
    return __fdividef(odd ? c[i][1] : c[i][0], odd ? c[i][3] : c[i][2]);
  }
  __device__ __forceinline__ float scale_of_token(int token) const {
    const int lane = diagonal_lane(token);
    const float low = __shfl_sync(~0u, scale(0), lane), high = __shfl_sync(~0u, scale(1), lane);
    return token < 8 ? low : high;
  }
};

// Both, for tiles whose rows may be too long for fp16: a token's scale must not depend on the others.
template <int kBits, int kSteps>
struct FitEither {
  Fit<kBits, kSteps, false> sums;
  FitByProducts products;

  __device__ __forceinline__ void add(int s, const float (&f)[4][2], const unsigned (&levels)[4]) {
    sums.add(s, f, levels);
    products.add(s, f, levels);
  }
};

// Rotated rows to codes, and the sums for the fit of scales. `step`: of the lane's own token.
template <int kBits, int kSteps, bool kIsV, class F>
__device__ __forceinline__ void encode(const Tile<kSteps>& f, float step, Codes<kBits, kSteps>& codes, F& fit) {
  using G = TileTokens<kIsV>;
  constexpr int kLevels = 1 << kBits;
  constexpr unsigned kMiddle = middle_level<kBits>();
  float inverse[G::kRows];
  G::spread(reciprocal(step), inverse);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    unsigned p[4], levels[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const unsigned first = __float_as_uint(__fmaf_rd(f[s][r][0], inverse[G::row(r, 0)], kMagic + kLevels / 2));
      const unsigned second = __float_as_uint(__fmaf_rd(f[s][r][1], inverse[G::row(r, 1)], kMagic + kLevels / 2));
      p[r] = clamp_halves(__byte_perm(first, second, 0x5410), kLevels - 1);
      // Exact: codes are fp16 subnormals.
      levels[r] = fma_pair(f16{}, p[r], 0x78007800u, (kMiddle | kMiddle << 16) ^ 0x80008000u);
    }
    fit.add(s, f[s], levels);
    codes.set(s, p);
  }
}

// Measure for the step of the lane's own token: the sum of squares, or for 8 bit the largest magnitude.
template <int kBits, int kSteps, bool kIsV>
__device__ __forceinline__ float measure_rows(const Tile<kSteps>& f) {
  using G = TileTokens<kIsV>;
  float part[G::kRows] = {};
#pragma unroll
  for (int s = 0; s < kSteps; s++)
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float x = f[s][r][half];
        float& m = part[G::row(r, half)];
        if constexpr (kBits == 8) m = larger(m, fabsf(x));
        else m += x * x;
      }
  if constexpr (kBits == 8) return G::reduce(part, larger);
  else return G::reduce(part, sum_of);
}

// True if a row is known to have been finite and within +-65504 before the rotation, which preserves the norm up to
// `factor`, and is so after it. False for NaN.
template <int kBits>
__device__ __forceinline__ bool is_fine(float measure, float factor) {
  constexpr float kLongest = 16.f;  // the largest sqrt(D), and 1 / factor
  return kBits == 8 ? measure * factor <= kLargest / kLongest : measure <= kLargest * kLargest;
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
    unsigned fields[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int token = kIsV ? 2 * t + 8 * (r >> 1) : g + 8 * (r & 1);
      fields[r] = (tokens.has(token) ? kMost : 0u) | (tokens.has(token + kIsV) ? kMost << 16 : 0u);
    }
#pragma unroll
    for (int s = 0; s < kSteps; s++) mask.set(s, fields);
    codes.template merge<kTiles>(to, tile, mask);
  }
}

// Rotated rows to codes and scales in the page. `kFine`: all rows are clean. `kept`: a scale of the lane's own token that is
// kept, and with it the codes that the row came from (if it is zero and so is the row, they become the middle); negative
// if there is none.
template <class In, int kSteps, int kBits, int kTiles, bool kIsV, bool kRotate, bool kFine, class Tokens = AllTokens>
__device__ __forceinline__ void write_side(const Tile<kSteps>& f, float measure, int kept, unsigned char* to, int tile,
                                           unsigned char* scales, const Tokens& tokens = Tokens{}) {
  using G = TileTokens<kIsV>;
  constexpr float kFactor = rotation_factor<kSteps, kRotate>(), kGain = kFactor * gain_of<kBits, kIsV>() / 512.f;
  Codes<kBits, kSteps> codes;
  float step = fmaxf(step_of<kBits, 16 * kSteps>(measure), kSmallestStep / kFactor);
  if constexpr (kFine && !kIsV) {
    FitByProducts fit;
    encode<kBits, kSteps, kIsV>(f, step, codes, fit);
    const unsigned first = scale_of(kGain * fit.scale(0)), second = scale_of(kGain * fit.scale(1));
    const int g = (threadIdx.x & 31) >> 2;
    if constexpr (Tokens::kAll) {
      if (fit.writes()) *reinterpret_cast<unsigned*>(scales + scale_row(tile, g)) = first | second << 16;
    } else if (fit.writes()) {
      unsigned short* pair = reinterpret_cast<unsigned short*>(scales + scale_row(tile, g));
      if (tokens.has(g)) pair[0] = static_cast<unsigned short>(first);
      if (tokens.has(g + 8)) pair[1] = static_cast<unsigned short>(second);
    }
  } else {
    const int token = G::token();
    if (!kFine && kept >= 0) step = fmaxf(to_float(f16{static_cast<unsigned short>(kept)}), kSmallestStep) / kFactor;
    float fitted;
    if constexpr (!kIsV && sizeof(In) == 2) {
      FitEither<kBits, kSteps> fit;
      encode<kBits, kSteps, kIsV>(f, step, codes, fit);
      const float sums = fit.sums.scale(), products = fit.products.scale_of_token(token);
      fitted = is_fine<kBits>(measure, kFactor) ? products : sums;
    } else {
      Fit<kBits, kSteps, kIsV> fit;
      encode<kBits, kSteps, kIsV>(f, step, codes, fit);
      fitted = fit.scale();
    }
    unsigned short scale = scale_of(kGain * fitted);
    if (!kFine && kept >= 0) scale = static_cast<unsigned short>(kept);
    bool writes = G::writes();
    if constexpr (!Tokens::kAll) writes = writes && tokens.has(token);
    if (writes) reinterpret_cast<unsigned short*>(scales)[scale_index(16 * tile + token, kIsV)] = scale;
  }
  write_codes<kTiles, kIsV>(codes, to, tile, tokens);
}
