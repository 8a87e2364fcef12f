// K and V rows of one head into whole pages of codes: a warp makes one side of a tile of 16 tokens.
//
//   rows [16, D] --16 dims at a time: mma with a Hadamard matrix of +-1--> fragments of float32, exact products
//   --butterflies over steps--> rotated rows --reduce, encode, refit--> codes, already in the page's order
//
// The rotation's factor (block ^ -0.5) is left to the scale: rows are kept sqrt(block) too long until then.
//
// The product leaves every lane with just the values whose codes it owns in the page (layout/fragments.py): K with
// tokens as rows of the product, V with dims as rows. So there is no exchange between lanes but the reductions, and
// a lane's words go out in 16-, 8- or 4-byte stores. Where a word is shared by two tiles (head dims whose number of
// steps is not a multiple of 2 or 4), the page is put together in shared memory.
//
// Rows that are not finite or beyond +-65504 show in the sum of squares; such a tile is done again with every value
// cleaned first. The arithmetic is that of cache/quantize_reference.py.
#include "fragments.cuh"
#include "mma.cuh"
#include "rotation.cuh"
#include "vec.cuh"

using i64 = long long;
using u64 = unsigned long long;

struct Params {
  const char* k;
  const char* v;
  unsigned char* pool;
  const void* pages;     // Index [n] destination, in units of 64 bytes
  const void* source;    // Index [n, tokens of a page] row of k; negative: an empty slot
  const void* v_source;  // the same for v
  const int* heads;      // [n]
  const float* centre;   // [m, D], subtracted from K, in the model's space
  const float* rotated;  // the same through the butterflies, without their factor
  const int* centres;    // [n] row of centre; null: n-th page has none
  i64 k_token, k_head, v_token, v_head;  // strides in bytes
};

constexpr float kLargest = 65504.f, kSmallestStep = 5.9604644775390625e-8f;
constexpr float kMagic = 12582912.f;  // 1.5 * 2^23: a sum with it, rounded down, holds the floor in its low bits

template <int kBits> __device__ __forceinline__ constexpr float gaussian_step() {
  return kBits == 2 ? 0.9957f : kBits == 3 ? 0.586f : 0.3352f;
}

// What codes lose of a row's length, as in quantize_reference.
template <int kBits, bool kIsV> __device__ __forceinline__ constexpr float gain_of() {
  if (kIsV) return kBits == 2 ? 1.0995f : kBits == 3 ? 1.0291f : kBits == 4 ? 1.0087f : 1.f;
  return kBits == 2 ? 1.0653f : kBits == 3 ? 1.0193f : kBits == 4 ? 1.0058f : 1.f;
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

template <class In> struct Quad { using type = uint2; };
template <> struct Quad<f32> { using type = uint4; };

template <class In>
__device__ __forceinline__ float quad_value(const typename Quad<In>::type& q, int i) {
  if constexpr (sizeof(In) == 4) return __uint_as_float(i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w);
  else return to_float(In{static_cast<unsigned short>((i < 2 ? q.x : q.y) >> (i % 2 * 16))});
}

// Tokens in a tile's fragments. A lane has values of several: K: tokens g + 8 (r % 2), shared by the 4 lanes of equal g;
// V: tokens 2t + half + 8 (r / 2), shared by the 8 lanes of equal t. Reductions leave each lane with one token of its
// own; what is found for it goes back to all lanes with `spread`.
template <bool kIsV> struct Group {
  static constexpr int kRows = kIsV ? 4 : 2;
  static __device__ __forceinline__ constexpr int row(int r, int half) { return kIsV ? (r >> 1) * 2 + half : r & 1; }
  // The lane's own token in the tile, and whether of the lanes that have it this one writes.
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
  static __device__ __forceinline__ void spread(float found, float (&x)[kRows]) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < kRows; i++) x[i] = __shfl_sync(~0u, found, kIsV ? i * 8 + (lane & 3) : (lane & 28) + i * 2);
  }
};

__device__ __forceinline__ float add(float a, float b) { return a + b; }
// Of magnitudes, compared as integers: a NaN counts as the largest.
__device__ __forceinline__ float larger(float a, float b) {
  return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
}

// Where a lane finds its two rows of a side: tokens g and g + 8 of the tile, dims 4t .. 4t + 3 of every step.
template <class In>
struct Source {
  using Raw = typename Quad<In>::type;
  const char* at[2];  // null: an empty slot

  template <class Index>
  __device__ __forceinline__ Source(const char* side, i64 token_stride, const Index (&rows)[2]) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) at[i] = rows[i] < 0 ? nullptr : side + rows[i] * token_stride + 4 * t * sizeof(In);
  }

  __device__ __forceinline__ Raw load(int step, int i) const {
    Raw raw{};
    if (at[i]) {
      const Vec<sizeof(Raw)> x = load_once<sizeof(Raw)>(at[i] + 16 * step * sizeof(In));
      if constexpr (sizeof(Raw) == 8) raw = make_uint2(x.words[0], x.words[1]);
      else raw = make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]);
    }
    return raw;
  }
};

// What comes off K. Whether there is one is asked of the arguments, not of the address: the machine code that asked an
// address which may be null (NVRTC 13.0, sm_90) reads it sooner after it is cleared than elsewhere; see
// tests/test_machine_code.py.
struct Centre {
  bool there;
  const float* rotated;  // through the butterflies, without their factor
  const float* all;      // in the model's space, from row 0
  const int* row;        // read where it is needed, which is rare
};

template <class In, int kSteps> using RawRows = typename Quad<In>::type[kSteps][2];

template <class In, int kSteps>
__device__ __forceinline__ void load_rows(const Source<In>& source, RawRows<In, kSteps>& raw) {
#pragma unroll
  for (int s = 0; s < kSteps; s++)
#pragma unroll
    for (int i = 0; i < 2; i++) raw[s][i] = source.load(s, i);
}

template <int kSteps>
__device__ __forceinline__ void clear(Tile<kSteps>& f) {
#pragma unroll
  for (int s = 0; s < kSteps; s++)
#pragma unroll
    for (int i = 0; i < 8; i++) f[s][i >> 1][i & 1] = 0.f;
}

// Loaded rows of 16-bit values to rotated ones; for K less the rotated centre, which is as long as they are. Empty
// slots stay zero.
template <class In, int kSteps, bool kIsV, bool kRotate>
__device__ __forceinline__ void rotate_rows(Tile<kSteps>& f, const RawRows<In, kSteps>& raw, const Source<In>& source,
                                            const Centre& centre) {
  unsigned h[2][2];
  rotation_operand<In, kRotate>(h);
  clear<kSteps>(f);
#pragma unroll
  for (int s = 0; s < kSteps; s++) rotate_step<In, kIsV>(f[s], raw[s], h);
  rotate_steps<kSteps, kRotate>(f);
  if (!kIsV && centre.there) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (source.at[i >> 1 & 1]) f[s][i >> 1][i & 1] -= __ldg(centre.rotated + 16 * s + 2 * t + 8 * (i >> 2) + (i & 1));
  }
}

// The same from memory, with every value centred and cleaned before the rotation, as the reference does it.
template <class In, int kSteps, bool kIsV, bool kRotate>
__device__ __forceinline__ void rotate_cleaned(Tile<kSteps>& f, const Source<In>& source, const Centre& centre) {
  unsigned h[2][2];
  rotation_operand<bf16, kRotate>(h);
  const int t = threadIdx.x & 3;
  const float* plain = centre.all;
  if (!kIsV && centre.there) plain += *static_cast<const volatile int*>(centre.row) * (16 * kSteps) + 4 * t;
  clear<kSteps>(f);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    float x[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const auto raw = source.load(s, i);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float value = quad_value<In>(raw, e);
        if (!kIsV && centre.there && source.at[i]) value -= __ldg(plain + 16 * s + e);
        x[i][e] = value != value ? 0.f : fminf(fmaxf(value, -kLargest), kLargest);
      }
    }
    rotate_step_exactly<kIsV>(f[s], x, h);
  }
  rotate_steps<kSteps, kRotate>(f);
}

// Correctly rounded for what lies well within the normal range, without the branch that the other values need.
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

// Rotated rows to codes and the fp16 scale of the lane's own token: step, encode, refit. `factor`: what rows are too
// long by.
template <int kBits, int kSteps, bool kIsV>
__device__ __forceinline__ unsigned short encode(const Tile<kSteps>& f, float measure, float factor,
                                                 Codes<kBits, kSteps>& codes) {
  using G = Group<kIsV>;
  constexpr int kLevels = 1 << kBits;
  float inverse[G::kRows], dot[G::kRows] = {}, square[G::kRows] = {};
  G::spread(reciprocal(fmaxf(step_of<kBits, 16 * kSteps>(measure), kSmallestStep / factor)), inverse);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    unsigned p[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const int i = G::row(r, 0), j = G::row(r, 1);
      const unsigned first = __float_as_uint(__fmaf_rd(f[s][r][0], inverse[i], kMagic + kLevels / 2));
      const unsigned second = __float_as_uint(__fmaf_rd(f[s][r][1], inverse[j], kMagic + kLevels / 2));
      p[r] = clamp_halves(__byte_perm(first, second, 0x5410), kLevels - 1);
      // Twice the level, an odd number: 2^23 + 2 code, less 2^23 + 2^bits - 1.
      const unsigned twice = p[r] * 2;
      const float a = __uint_as_float(__byte_perm(twice, 0x4b000000u, 0x7610)) - (8388608.f + kLevels - 1);
      const float b = __uint_as_float(__byte_perm(twice, 0x4b000000u, 0x7632)) - (8388608.f + kLevels - 1);
      dot[i] += f[s][r][0] * a;
      square[i] += a * a;
      dot[j] += f[s][r][1] * b;
      square[j] += b * b;
    }
    codes.set(s, p);
  }
  const float gain = 2.f * factor * gain_of<kBits, kIsV>();
  const float scale = gain * __fdividef(G::reduce(dot, add), G::reduce(square, add));
  unsigned short out;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(out) : "f"(fminf(fmaxf(scale, 0.f), kLargest)));
  return out;
}

// What the step of the lane's own token is made of: the sum of squares, or for 8 bit the largest magnitude.
template <int kBits, int kSteps, bool kIsV>
__device__ __forceinline__ float measure_rows(const Tile<kSteps>& f) {
  using G = Group<kIsV>;
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
  else return G::reduce(part, add);
}

// Whether every row of the tile can be trusted to have been finite and within +-65504 before the rotation, which
// preserves the norm but for `factor`. False for NaN.
template <int kBits>
__device__ __forceinline__ bool all_fine(float measure, float factor) {
  constexpr float kLongest = 16.f;  // the largest sqrt(D)
  const bool fine = kBits == 8 ? measure * factor <= kLargest / kLongest : measure * factor * factor <= kLargest * kLargest;
  return __all_sync(~0u, fine);
}

// One side of a tile, from rows in memory to codes and scales in the page.
template <class In, int kSteps, int kBits, int kTiles, bool kIsV, bool kRotate>
__device__ __forceinline__ void quantize_side(const Source<In>& source, const Centre& centre, unsigned char* to, int tile,
                                              unsigned char* scales) {
  constexpr float kFactor = rotation_factor<kSteps, kRotate>();
  using G = Group<kIsV>;
  Tile<kSteps> f;
  float measure = 0.f;
  bool fine = false;
  if constexpr (sizeof(In) == 2) {  // float32 has no fast way
    RawRows<In, kSteps> raw;
    load_rows<In, kSteps>(source, raw);
    rotate_rows<In, kSteps, kIsV, kRotate>(f, raw, source, centre);
    measure = measure_rows<kBits, kSteps, kIsV>(f);
    fine = all_fine<kBits>(measure, kFactor);
  }
  if (!fine) {
    rotate_cleaned<In, kSteps, kIsV, kRotate>(f, source, centre);
    measure = measure_rows<kBits, kSteps, kIsV>(f);
  }
  Codes<kBits, kSteps> codes;
  const unsigned short scale = encode<kBits, kSteps, kIsV>(f, measure, kFactor, codes);
  codes.template flush<kTiles>(to, tile);
  // (k[g], k[g + 8], v[g], v[g + 8]) for each row g
  const int token = G::token();
  if (G::writes())
    *reinterpret_cast<unsigned short*>(scales + tile * 64 + token % 8 * 8 + (kIsV ? 4 : 0) + token / 8 * 2) = scale;
}

// A block is a page where its tiles share words, else one warp: warps that start apart load and compute at
// different times, and so keep both memory and arithmetic busy.
template <class In, int kKBits, int kVBits, int kSteps, int kTiles> struct Cut {
  static constexpr bool kStaged = !Codes<kKBits, kSteps>::kWhole || !Codes<kVBits, kSteps>::kWhole;
  static constexpr int kThreads = kStaged ? kTiles * 64 : 32;
  // Blocks a multiprocessor, so that the compiler keeps to 80, 96, 128 or 168 registers: as few as do not spill.
  static constexpr int kBlocks = kStaged || kSteps > 8 ? 8 / (kThreads / 32)
                                 : sizeof(In) == 4     ? 12
                                 : kSteps <= 4         ? 24
                                 : kKBits + kVBits < 9 ? 18
                                                       : 16;
};

// Index: int, or i64 for rows and pages that lie anywhere, given by their addresses.
template <class In, int kDim, int kKBits, int kVBits, int kTokens, bool kRotate, class Index = int,
          int kSteps = kDim / 16, int kTiles = kTokens / 16>
__global__ void __launch_bounds__(Cut<In, kKBits, kVBits, kSteps, kTiles>::kThreads,
                                  Cut<In, kKBits, kVBits, kSteps, kTiles>::kBlocks)
    quantize_pages(const __grid_constant__ Params p) {
  constexpr int kKBytes = code_bytes<kKBits, kSteps, kTiles>(), kVBytes = code_bytes<kVBits, kSteps, kTiles>();
  constexpr bool kStaged = Cut<In, kKBits, kVBits, kSteps, kTiles>::kStaged;
  constexpr int kThreads = Cut<In, kKBits, kVBits, kSteps, kTiles>::kThreads;
  __shared__ alignas(16) unsigned char stage[kStaged ? kKBytes + kVBytes : 16];

  const int g = (threadIdx.x & 31) >> 2;
  const int n = kStaged ? blockIdx.x : blockIdx.x / (2 * kTiles);
  const int warp = kStaged ? threadIdx.x >> 5 : blockIdx.x % (2 * kTiles);
  const int tile = warp % kTiles;
  const Index* slots = static_cast<const Index*>(warp < kTiles ? p.source : p.v_source);
  slots += static_cast<i64>(n) * kTokens + tile * 16 + g;
  const Index rows[2] = {__ldg(slots), __ldg(slots + 8)};
  const int head = __ldg(p.heads + n);
  unsigned char* page = p.pool + static_cast<i64>(__ldg(static_cast<const Index*>(p.pages) + n)) * 64;
  unsigned char* codes = page;
  if constexpr (kStaged) {
    codes = stage;
    for (int i = threadIdx.x * 16; i < kKBytes + kVBytes; i += kThreads * 16)
      *reinterpret_cast<uint4*>(stage + i) = make_uint4(0, 0, 0, 0);
    __syncthreads();
  }
  unsigned char* scales = page + kKBytes + kVBytes;
  if (warp < kTiles) {
    Centre centre = {p.centres != nullptr, p.rotated, p.centre, p.centres + n};
    if (centre.there) centre.rotated += static_cast<i64>(__ldg(centre.row)) * kDim;
    const Source<In> k(p.k + head * p.k_head, p.k_token, rows);
    quantize_side<In, kSteps, kKBits, kTiles, false, kRotate>(k, centre, codes, tile, scales);
  } else {
    const Source<In> v(p.v + head * p.v_head, p.v_token, rows);
    quantize_side<In, kSteps, kVBits, kTiles, true, kRotate>(v, Centre{}, codes + kKBytes, tile, scales);
  }
  if constexpr (kStaged) {
    __syncthreads();
    for (int i = threadIdx.x * 16; i < kKBytes + kVBytes; i += kThreads * 16)
      *reinterpret_cast<uint4*>(page + i) = *reinterpret_cast<const uint4*>(stage + i);
  }
}
