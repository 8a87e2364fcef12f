// Plain rows of a tile, in global or shared memory, to transformed rows in registers: those of quant/reference.py, bit for bit.
#pragma once
#include "cp_async.cuh"
#include "ldmatrix.cuh"
#include "numbers.cuh"
#include "rotation.cuh"
#include "swizzle.cuh"
#include "vec.cuh"
#include "warp.cuh"

template <class In> struct Quad { using type = uint2; };
template <> struct Quad<f32> { using type = uint4; };

template <class In>
__device__ __forceinline__ float quad_value(const typename Quad<In>::type& q, int i) {
  if constexpr (sizeof(In) == 4) return __uint_as_float(i == 0 ? q.x : i == 1 ? q.y : i == 2 ? q.z : q.w);
  else return to_float(In{static_cast<unsigned short>((i < 2 ? q.x : q.y) >> (i % 2 * 16))});
}

// Addresses of a lane's two rows of a side, tokens g and g + 8 of the tile: dims 4t .. 4t + 3 of every step.
template <class In>
struct InMemory {
  static constexpr bool kByMatrix = false;
  using Raw = typename Quad<In>::type;
  const char* row[2];
  bool there[2];  // false: an empty slot, or codes

  __device__ __forceinline__ Raw load(int step, int i) const {
    Raw raw{};
    if (there[i]) {
      const Vec<sizeof(Raw)> x = load_once<sizeof(Raw)>(row[i] + 16 * step * sizeof(In));
      if constexpr (sizeof(Raw) == 8) raw = make_uint2(x.words[0], x.words[1]);
      else raw = make_uint4(x.words[0], x.words[1], x.words[2], x.words[3]);
    }
    return raw;
  }
  template <bool kIsV>
  __device__ __forceinline__ void load_operand(uint2 (&raw)[2], int step) const {
    raw[0] = load(step, 0);
    raw[1] = load(step, 1);
  }
};

// In shared memory, where absent rows are zeros.
template <class In, int kSteps>
struct InStage {
  static constexpr bool kByMatrix = sizeof(In) == 2;
  using Rows = Swizzle<kSteps * sizeof(In)>;
  static constexpr int kBytes = 16 * Rows::kBytes;
  using Raw = typename Quad<In>::type;
  const unsigned char* rows;
  bool there[2];

  __device__ __forceinline__ Raw load(int step, int i) const {
    const int g = (threadIdx.x & 31) >> 2, byte = (16 * step + 4 * (threadIdx.x & 3)) * sizeof(In);
    return *reinterpret_cast<const Raw*>(rows + Rows::offset(g + 8 * i, byte / 16) + byte % 16);
  }
  // The same in operand order, where a lane has dims 2t, 2t + 1, 2t + 8, 2t + 9.
  template <bool kIsV>
  __device__ __forceinline__ void load_operand(uint2 (&raw)[2], int step) const {
    const unsigned lane = threadIdx.x & 31;
    const unsigned row = kIsV ? ChunksFirst::row(lane) : RowsFirst::row(lane);
    const unsigned chunk = kIsV ? ChunksFirst::chunk(lane) : RowsFirst::chunk(lane);
    unsigned m[4];
    ldmatrix_x4(m, Rows::further(shared_address(rows) + Rows::offset(row, chunk), row, chunk, step));
    raw[0] = make_uint2(m[0], kIsV ? m[1] : m[2]);
    raw[1] = make_uint2(kIsV ? m[2] : m[1], m[3]);
  }
  // The one of rows 0 to 7 that this lane and three others copy: two rows of eight lanes are in different banks.
  static __device__ __forceinline__ int row_to_copy() {
    const int i = (threadIdx.x & 31) >> 2;
    return Rows::kTogether == 8 ? (i >> 1) + (i & 1) * 4 : i;
  }
};

template <int kSteps>
__device__ __forceinline__ void clear(Tile<kSteps>& f) {
#pragma unroll
  for (int s = 0; s < kSteps; s++)
#pragma unroll
    for (int i = 0; i < 8; i++) f[s][i >> 1][i & 1] = 0.f;
}

// The centre of K, rotated and negated: added to its rotated rows. Every two dims are there twice, for tokens g and g + 8, in
// accumulator order.
template <int kSteps, bool kRotate>
__device__ __forceinline__ void rotate_centre(float* rotated, const float* centre) {
  constexpr int kDim = 16 * kSteps, kBlock = kRotate ? kDim & -kDim : 1;
  constexpr int kParts = (kDim + 127) / 128;  // of 128 dims, four per lane
  const int lane = threadIdx.x & 31;
  float x[kParts][4];
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    const int dim = 128 * part + 4 * lane;
#pragma unroll
    for (int i = 0; i < 4; i++) x[part][i] = dim < kDim ? -centre[dim + i] : 0.f;
    if constexpr (kRotate) {
      butterfly(x[part][0], x[part][1]);
      butterfly(x[part][2], x[part][3]);
      butterfly(x[part][0], x[part][2]);
      butterfly(x[part][1], x[part][3]);
    }
#pragma unroll
    for (int apart = 1; apart < 32 && 4 * apart < kBlock; apart *= 2)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float other = __shfl_xor_sync(~0u, x[part][i], apart);
        x[part][i] = lane & apart ? other - x[part][i] : x[part][i] + other;
      }
  }
  if constexpr (kBlock == 256)
#pragma unroll
    for (int i = 0; i < 4; i++) butterfly(x[0][i], x[1][i]);
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    const int dim = 128 * part + 4 * lane;
    if (dim < kDim)
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        *reinterpret_cast<float4*>(rotated + 2 * (dim + i)) =
            make_float4(x[part][i], x[part][i + 1], x[part][i], x[part][i + 1]);
  }
  __syncwarp();
}

template <int kSteps>
__device__ __forceinline__ void no_centre(float* rotated) {
  for (int i = threadIdx.x & 31; i < 32 * kSteps; i += 32) rotated[i] = 0.f;
  __syncwarp();
}

// K minus the centre, in rotated rows that are `times` too long. Empty slots are zero and stay so.
template <int kSteps, class Source>
__device__ __forceinline__ void subtract_centre(Tile<kSteps>& f, const Source& source, const float* centre,
                                                const float (&times)[2]) {
  const float first = source.there[0] ? times[0] : 0.f, second = source.there[1] ? times[1] : 0.f;
#pragma unroll
  for (int s = 0; s < kSteps; s++)
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      const float4 x = *reinterpret_cast<const float4*>(centre + 32 * s + 8 * r + 4 * (threadIdx.x & 3));
      f[s][r][0] = fmaf(x.x, first, f[s][r][0]);
      f[s][r][1] = fmaf(x.y, first, f[s][r][1]);
      f[s][r + 1][0] = fmaf(x.z, second, f[s][r + 1][0]);
      f[s][r + 1][1] = fmaf(x.w, second, f[s][r + 1][1]);
    }
}

// Bits of 16-bit types: of the mantissa, and the bias of exponents. kLeast is that of the smallest grid, or of one on which
// all smaller values are.
template <class In> struct Bits;
template <> struct Bits<bf16> {
  static constexpr int kMantissa = 7, kBias = 127, kLeast = kBias + kLeastPower;
};
template <> struct Bits<f16> {
  static constexpr int kMantissa = 10, kBias = 15, kLeast = 1;
};

// Rows of 16-bit values, as operands.
//
// A row is rounded to its grid (quant/reference.py) by one product with a power of two that makes a unit of the grid the
// smallest subnormal number. The matrix of the rotation has +-2^kUp instead of +-1, after which the row is 2^-e times its
// length, where e is the exponent of its largest value, with kLeast as the minimum. All later steps scale with powers of two.
template <class In, int kSteps, bool kIsV, bool kRotate>
struct Operands {
  using B = Bits<In>;
  static constexpr int kBlock = 16 * (kSteps & -kSteps);
  static constexpr int kLog = kBlock == 16 ? 4 : kBlock == 32 ? 5 : kBlock == 64 ? 6 : kBlock == 128 ? 7 : 8;
  static constexpr int kMost = 22 - kLog;  // exponent of a row whose grid is one
  static constexpr int kUp = kRotate ? B::kBias + B::kMantissa - 1 - kMost : 0;
  static constexpr unsigned kEnd = (B::kBias + (kMost < 15 ? kMost : 15) + 1) << B::kMantissa;
  uint2 raw[kSteps][2];
  int exponent[2];  // of rows g and g + 8, with bias

  // False if a row is too large for the grid, infinite or NaN.
  template <class Source>
  __device__ __forceinline__ bool load(const Source& source) {
    unsigned most[2] = {};
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      source.template load_operand<kIsV>(raw[s], s);
#pragma unroll
      for (int i = 0; i < 2; i++) most[i] = larger_pair(In{}, larger_pair(In{}, most[i], raw[s][i].x), raw[s][i].y);
    }
    // Of row g in the low half, of row g + 8 in the high one.
    unsigned both = larger_pair(In{}, __byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
    both = larger_pair(In{}, both, __shfl_xor_sync(~0u, both, 1));
    both = larger_pair(In{}, both, __shfl_xor_sync(~0u, both, 2)) & 0x7fff7fffu;
    const unsigned first = both & 0xffffu, second = both >> 16;
    exponent[0] = max(static_cast<int>(first >> B::kMantissa), B::kLeast);
    exponent[1] = max(static_cast<int>(second >> B::kMantissa), B::kLeast);
    return __all_sync(~0u, max(first, second) < kEnd);
  }

  // The exponent of the lane's own token (quantize_encode.cuh): its transformed row is 2^-e times as long.
  __device__ __forceinline__ int own_exponent() const {
    if constexpr (!kRotate) return 0;
    const int lane = threadIdx.x & 31;
    if constexpr (!kIsV) return (lane & 2 ? exponent[1] : exponent[0]) - B::kBias;
    const int both = __shfl_sync(~0u, exponent[0] | exponent[1] << 16, 8 * (lane & 3) + 4 * (lane >> 4));
    return (lane & 4 ? both >> 16 : both & 0xffff) - B::kBias;
  }

  // To transformed rows (quant/reference.py), 2^-e times as long.
  template <class Source>
  __device__ __forceinline__ void transform(Tile<kSteps>& f, const Source& source, const float* centre) {
    unsigned h[2][2];
    rotation_operand<In, kRotate, Source::kByMatrix>(h, power_of_two(kUp));
    clear<kSteps>(f);
    float times[2] = {1.f, 1.f};
    if constexpr (kRotate)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int down = B::kBias + kMost - exponent[i];  // 2^down units of the smallest subnormal number
        const unsigned power = down < B::kMantissa ? 1u << down : static_cast<unsigned>(down - B::kMantissa + 1) << B::kMantissa;
        times[i] = power_of_two(B::kBias - exponent[i]);
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          raw[s][i].x = multiply_pair(In{}, raw[s][i].x, power * 0x10001u);
          raw[s][i].y = multiply_pair(In{}, raw[s][i].y, power * 0x10001u);
        }
      }
    rotate_rows<In, kSteps, kIsV, kRotate>(f, raw, h);
    if constexpr (!kIsV) subtract_centre<kSteps>(f, source, centre, times);
  }
};

// A lane's values of a step, cleaned; K divided by `balance` if there is one.
template <class In, bool kBalance, class Source>
__device__ __forceinline__ void clean_values(float (&x)[2][4], const Source& source, int s, const float* balance) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const auto raw = source.load(s, i);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      x[i][e] = quad_value<In>(raw, e);
      if constexpr (kBalance) x[i][e] = __fmul_rn(x[i][e], __frcp_rn(__ldg(balance + 16 * s + 4 * (threadIdx.x & 3) + e)));
      x[i][e] = clean(x[i][e]);
    }
  }
}

// Rows of any type and any values to transformed ones, in float32. `balance`: K is divided by it first.
template <class In, int kSteps, bool kIsV, bool kRotate, bool kBalance, class Source>
__device__ __forceinline__ void transform_any(Tile<kSteps>& f, const Source& source, const float* centre,
                                              const float* balance = nullptr) {
  float magic[2];
  if constexpr (kRotate) {
    float most[2] = {};
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      float x[2][4];
      clean_values<In, kBalance>(x, source, s, balance);
#pragma unroll
      for (int i = 0; i < 8; i++) most[i >> 2] = fmaxf(most[i >> 2], fabsf(x[i >> 2][i & 3]));
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
      magic[i] = grid_of<16 * kSteps>(fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2)));
    }
  }
  unsigned h[2][2];
  rotation_operand<bf16, kRotate>(h);
  clear<kSteps>(f);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    float x[2][4];
    clean_values<In, kBalance>(x, source, s, balance);
    if constexpr (kRotate)
#pragma unroll
      for (int i = 0; i < 8; i++) x[i >> 2][i & 3] = on_grid(x[i >> 2][i & 3], magic[i >> 2]);
    rotate_step_exactly<kIsV>(f[s], x, h);
  }
  rotate_steps<kSteps, kRotate>(f);
  if constexpr (!kIsV) subtract_centre<kSteps>(f, source, centre, {1.f, 1.f});
}
