// Plain rows of a tile, in global or shared memory, to rotated rows in registers.
#pragma once
#include "cp_async.cuh"
#include "ldmatrix.cuh"
#include "numbers.cuh"
#include "rotation.cuh"
#include "swizzle.cuh"
#include "vec.cuh"

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

// The centre subtracted from K. Whether there is one is read from the arguments, not from the address: machine code that tested
// an address which may be null (NVRTC 13.0, sm_90) read it sooner after it was cleared than elsewhere; see
// tests/test_machine_code.py.
struct Centre {
  bool there;
  const float* plain;  // in the model's space
  const float* begin;  // initial accumulators of the products of rows, in shared memory; zeros if there is none
};

template <int kSteps>
__device__ __forceinline__ void clear(Tile<kSteps>& f) {
#pragma unroll
  for (int s = 0; s < kSteps; s++)
#pragma unroll
    for (int i = 0; i < 8; i++) f[s][i >> 1][i & 1] = 0.f;
}

// Initial accumulators of the products of K's rows: the centre after the same butterflies, negated. Every two dims
// are there twice, for tokens g and g + 8, in accumulator order.
template <int kSteps, bool kRotate>
__device__ __forceinline__ void begin_products(float* begin, const float* centre) {
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
        *reinterpret_cast<float4*>(begin + 2 * (dim + i)) = make_float4(x[i], x[i + 1], x[i], x[i + 1]);
  }
  __syncwarp();
}

template <int kSteps>
__device__ __forceinline__ void begin_with_nothing(float* begin) {
  for (int i = threadIdx.x & 31; i < 32 * kSteps; i += 32) begin[i] = 0.f;
  __syncwarp();
}

// Rows of 16-bit values to rotated ones, K minus the centre. Empty slots are zero.
template <class In, int kSteps, bool kIsV, bool kRotate, class Source>
__device__ __forceinline__ void rotate_rows(Tile<kSteps>& f, const Source& source, const Centre& centre) {
  unsigned h[2][2];
  rotation_operand<In, kRotate, Source::kByMatrix>(h);
  if constexpr (kIsV) {
    clear<kSteps>(f);
  } else {
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int r = 0; r < 4; r += 2) {
        const float4 x = *reinterpret_cast<const float4*>(centre.begin + 32 * s + 8 * r + 4 * (threadIdx.x & 3));
        f[s][r][0] = x.x;
        f[s][r][1] = x.y;
        f[s][r + 1][0] = x.z;
        f[s][r + 1][1] = x.w;
      }
  }
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    uint2 raw[2];
    source.template load_operand<kIsV>(raw, s);
    rotate_step<In, kIsV>(f[s], raw, h);
  }
  rotate_steps<kSteps, kRotate>(f);
  if (!kIsV && !__all_sync(~0u, source.there[0] && source.there[1])) {
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (!source.there[i >> 1 & 1]) f[s][i >> 1][i & 1] = 0.f;
  }
}

// Same with every value centred and cleaned before the rotation, as in the reference.
template <class In, int kSteps, bool kIsV, bool kRotate, class Source>
__device__ __forceinline__ void rotate_cleaned(Tile<kSteps>& f, const Source& source, const Centre& centre) {
  unsigned h[2][2];
  rotation_operand<bf16, kRotate>(h);
  const int t = threadIdx.x & 3;
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
        if (!kIsV && centre.there && source.there[i]) value -= __ldg(centre.plain + 16 * s + 4 * t + e);
        x[i][e] = clean(value);
      }
    }
    rotate_step_exactly<kIsV>(f[s], x, h);
  }
  rotate_steps<kSteps, kRotate>(f);
}
