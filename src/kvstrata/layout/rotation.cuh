// The Walsh-Hadamard rotation of layout/rotation.py on a warp's tile: up to 32 dims as products of the tensor cores with
// matrices of +-1, and then butterflies over steps, in registers. Rows on the grid of quant/reference.py have exact sums,
// whatever their order.
#pragma once
#include "fragments.cuh"
#include "mma.cuh"

// The rotation of 16 dims as an operand: entry (in, out) of a Hadamard matrix, or of the identity. A lane's four
// registers serve as B (K: columns are out) and as A (V: rows are out). Column k of the operand represents dim
// 4t, 4t + 1, 4t + 2, 4t + 3 of a lane, so that a lane loads 8 bytes of a row at once; kByMatrix: dim k, as with ldmatrix.
// `size`: of the entries.
template <class In, bool kRotate, bool kByMatrix = false>
__device__ __forceinline__ void rotation_operand(unsigned (&h)[2][2], float size = 1.f) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int part = 0; part < 2; part++) {
      float entry[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int in = (kByMatrix ? 2 * t + 8 * part : 4 * t + 2 * part) + half, out = 8 * n + g;
        entry[half] = kRotate ? (__popc(in & out) & 1 ? -size : size) : (in == out ? size : 0.f);
      }
      h[n][part] = pair_of(In{}, entry[0], entry[1]);
    }
}

// One step of a tile: rows g and g + 8, dims 4t .. 4t + 3 of each as two registers (`low`, `high`).
template <class In, bool kIsV>
__device__ __forceinline__ void rotate_step(float (&f)[4][2], const uint2 (&rows)[2], const unsigned (&h)[2][2]) {
  float c[2][4] = {{f[0][0], f[0][1], f[1][0], f[1][1]}, {f[2][0], f[2][1], f[3][0], f[3][1]}};
  if constexpr (kIsV) {
    const unsigned a[4] = {h[0][0], h[1][0], h[0][1], h[1][1]};
    mma_16x8x16(In{}, c[0], a, rows[0].x, rows[0].y);
    mma_16x8x16(In{}, c[1], a, rows[1].x, rows[1].y);
  } else {
    const unsigned a[4] = {rows[0].x, rows[1].x, rows[0].y, rows[1].y};
    mma_16x8x16(In{}, c[0], a, h[0][0], h[0][1]);
    mma_16x8x16(In{}, c[1], a, h[1][0], h[1][1]);
  }
#pragma unroll
  for (int r = 0; r < 4; r++) {
    f[r][0] = c[r >> 1][(r & 1) * 2];
    f[r][1] = c[r >> 1][(r & 1) * 2 + 1];
  }
}

__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b, difference = a - b;
  a = sum;
  b = difference;
}

// Butterflies over steps of 16 dims with kValues values x(step, value), at distance kFirst and more, in the order of
// layout/rotation.py.
template <int kSteps, int kValues, int kFirst = 1, class Value>
__device__ __forceinline__ void butterflies(Value x) {
  constexpr int kBlock = kSteps & -kSteps;
#pragma unroll
  for (int d = kFirst; d < kBlock; d *= 2)
#pragma unroll
    for (int s = 0; s < kSteps; s++)
      if (!(s & d))
#pragma unroll
        for (int i = 0; i < kValues; i++) butterfly(x(s, i), x(s + d, i));
}

// The rest of the rotation, after products of kFirst steps.
template <int kSteps, bool kRotate, int kFirst = 1>
__device__ __forceinline__ void rotate_steps(Tile<kSteps>& f) {
  if constexpr (kRotate) butterflies<kSteps, 8, kFirst>([&](int s, int i) -> float& { return f[s][i >> 1][i & 1]; });
}

// The whole rotation of rows as operands, into zeros. Two steps together are products with the matrix and its negative, three
// for every two of single steps: less time than butterflies. Four steps together would take more.
template <class In, int kSteps, bool kIsV, bool kRotate>
__device__ __forceinline__ void rotate_rows(Tile<kSteps>& f, const uint2 (&rows)[kSteps][2], const unsigned (&h)[2][2]) {
  constexpr int kBlock = kSteps & -kSteps, kTogether = kRotate && kBlock > 1 ? 2 : 1;
  const unsigned minus[2][2] = {{h[0][0] ^ 0x80008000u, h[0][1] ^ 0x80008000u}, {h[1][0] ^ 0x80008000u, h[1][1] ^ 0x80008000u}};
#pragma unroll
  for (int first = 0; first < kSteps; first += kTogether)
#pragma unroll
    for (int in = 0; in < kTogether; in++)
#pragma unroll
      for (int out = 0; out < kTogether; out++)
        rotate_step<In, kIsV>(f[first + out], rows[first + in], __popc(in & out) & 1 ? minus : h);
  rotate_steps<kSteps, kRotate, kTogether>(f);
}

// Factor by which the rows are too long after the butterflies.
template <int kSteps, bool kRotate>
__device__ __forceinline__ constexpr float rotation_factor() {
  constexpr int kBlock = kSteps & -kSteps;
  return !kRotate       ? 1.f
         : kBlock == 1  ? 0.25f
         : kBlock == 2  ? 0.17677669529663687f
         : kBlock == 4  ? 0.125f
         : kBlock == 8  ? 0.08838834764831845f
                        : 0.0625f;
}

// float32 as three bfloat16 that add up to it.
template <bool kIsV>
__device__ __forceinline__ void rotate_step_exactly(float (&f)[4][2], float (&x)[2][4], const unsigned (&h)[2][2]) {
#pragma unroll
  for (int part = 0; part < 3; part++) {
    uint2 rows[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      rows[i] = make_uint2(pair_of(bf16{}, x[i][0], x[i][1]), pair_of(bf16{}, x[i][2], x[i][3]));
      x[i][0] -= __uint_as_float(rows[i].x << 16);
      x[i][1] -= __uint_as_float(rows[i].x & 0xffff0000u);
      x[i][2] -= __uint_as_float(rows[i].y << 16);
      x[i][3] -= __uint_as_float(rows[i].y & 0xffff0000u);
    }
    rotate_step<bf16, kIsV>(f, rows, h);
  }
}
