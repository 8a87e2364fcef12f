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

// The centre of K after the butterflies over 16 dims, negated: added to the products of its rows. Every two dims are there
// twice, for tokens g and g + 8, in accumulator order.
template <int kSteps, bool kRotate>
__device__ __forceinline__ void rotate_centre(float* rotated, const float* centre) {
  constexpr int kDim = 16 * kSteps, kLanes = kRotate ? 4 : 0;  // of four dims each
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int first = 0; first < kDim; first += 128) {
    const int dim = first + 4 * lane;
    float x[4] = {};
    if (dim < kDim)
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = -centre[dim + i];
    if constexpr (kRotate) {
      const float a = x[0] + x[1], b = x[0] - x[1], c = x[2] + x[3], d = x[2] - x[3];
      x[0] = a + c;
      x[1] = b + d;
      x[2] = a - c;
      x[3] = b - d;
    }
#pragma unroll
    for (int apart = 1; apart < kLanes; apart *= 2)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float other = __shfl_xor_sync(~0u, x[i], apart);
        x[i] = lane & apart ? other - x[i] : x[i] + other;
      }
    if (dim < kDim)
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        *reinterpret_cast<float4*>(rotated + 2 * (dim + i)) = make_float4(x[i], x[i + 1], x[i], x[i + 1]);
  }
  __syncwarp();
}

template <int kSteps>
__device__ __forceinline__ void no_centre(float* rotated) {
  for (int i = threadIdx.x & 31; i < 32 * kSteps; i += 32) rotated[i] = 0.f;
  __syncwarp();
}

// The rest after the products: K minus the centre, and butterflies over steps. Empty slots are zero and stay so.
template <int kSteps, bool kIsV, bool kRotate, class Source>
__device__ __forceinline__ void finish_rows(Tile<kSteps>& f, const Source& source, const float* centre) {
  if constexpr (!kIsV) {
    const float times[2] = {source.there[0] ? 1.f : 0.f, source.there[1] ? 1.f : 0.f};
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        const float4 x = *reinterpret_cast<const float4*>(centre + 32 * s + 8 * r + 4 * (threadIdx.x & 3));
        f[s][r][0] = fmaf(x.x, times[0], f[s][r][0]);
        f[s][r][1] = fmaf(x.y, times[0], f[s][r][1]);
        f[s][r + 1][0] = fmaf(x.z, times[1], f[s][r + 1][0]);
        f[s][r + 1][1] = fmaf(x.w, times[1], f[s][r + 1][1]);
      }
  }
  rotate_steps<kSteps, kRotate>(f);
}

// Exponents of 16-bit values, in place. A row is rounded to its grid by two products with powers of two: the first one makes
// values that are not on the grid subnormal. Rows of kEnd and more have no such powers, those below kLeast are on the grid.
template <class In> struct Exponent;
template <> struct Exponent<bf16> {
  static constexpr unsigned kMask = 0x7f80, kOne = 127 << 7, kLeast = 12 << 7, kEnd = kOne + kLeast;
};
template <> struct Exponent<f16> {
  static constexpr unsigned kMask = 0x7c00, kOne = 15 << 10, kLeast = 9 << 10, kEnd = kOne + kLeast;
};

// Rows of 16-bit values, as operands.
template <class In, int kSteps, bool kIsV>
struct Operands {
  using E = Exponent<In>;
  uint2 raw[kSteps][2];
  unsigned size[2];  // the bits of the largest magnitude of rows g and g + 8

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
    both = larger_pair(In{}, both, __shfl_xor_sync(~0u, both, 2));
    size[0] = both & 0x7fffu;
    size[1] = both >> 16 & 0x7fffu;
    return __all_sync(~0u, max(size[0], size[1]) < E::kEnd);
  }

  // To transformed rows (quant/reference.py).
  template <bool kRotate, class Source>
  __device__ __forceinline__ void transform(Tile<kSteps>& f, const Source& source, const float* centre) {
    unsigned h[2][2], down[2], up[2];
    rotation_operand<In, kRotate, Source::kByMatrix>(h);
    clear<kSteps>(f);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const unsigned exponent = max(size[i] & E::kMask, E::kLeast);
      down[i] = (E::kEnd - exponent) * 0x10001u;
      up[i] = (E::kOne - E::kLeast + exponent) * 0x10001u;
    }
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
      if constexpr (kRotate)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          raw[s][i].x = multiply_pair(In{}, multiply_pair(In{}, raw[s][i].x, down[i]), up[i]);
          raw[s][i].y = multiply_pair(In{}, multiply_pair(In{}, raw[s][i].y, down[i]), up[i]);
        }
      rotate_step<In, kIsV>(f[s], raw[s], h);
    }
    finish_rows<kSteps, kIsV, kRotate>(f, source, centre);
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
      magic[i] = grid_of(fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2)));
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
  finish_rows<kSteps, kIsV, kRotate>(f, source, centre);
}
