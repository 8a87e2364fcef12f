// Moves single tokens from page to page: decodes, encodes for another tier and writes one side of one move per warp.
//
// No move of a launch writes where another reads (cache/move/phases.py). Moves do share 32-bit words of codes: a warp adds
// the difference of its own fields to a word. Sums of such differences are correct in any order, and a field that no
// move changes is the same in every intermediate sum, so words may be read at any time.
//
// A lane holds cells of the token (planes.cuh). Codes and scales are those of quant/reference.py, bit for bit.
#include "fp8.cuh"
#include "numbers.cuh"
#include "planes.cuh"
#include "rotation.cuh"
#include "vec.cuh"

struct Tier {
  int k_bits, v_bits;  // 0: plain rows
  int v_offset, scale_offset, position_offset, importance_offset;
};

struct Params {
  const int* packed;    // [n, 12], columns as in moves.COLUMNS
  const i64* pointers;  // [slabs]
  const char* k;        // new rows
  const char* v;
  const float* centre;  // [m, D]
  // int8 [m, D] of K, see `aim` in quant/reference.py; null: none
  const signed char* direction;
  i64 k_row, v_row;     // strides in bytes
  int n, units;
  float step[9], k_gain[9], v_gain[9];  // by width: the step for a unit Gaussian, the gains of scales
  int per_k_gain[9];                    // 4096 / k_gain
  Tier tiers[kMaxTiers];
};

__device__ __forceinline__ float add_lanes(float x, int apart) { return __fadd_rn(x, __shfl_xor_sync(~0u, x, apart)); }

// Of magnitudes, which compare as their bits do.
__device__ __forceinline__ float warp_max(float x) { return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(x))); }

template <int kDim, int kTokens, bool kIsV>
__device__ __forceinline__ void read_codes(Row<kDim, kIsV>& row, const char* codes, int slot, int bits) {
  if (bits == 8) TokenCodes<kDim, kTokens, 8, kIsV>::read(row, codes, slot);
  else if (bits == 4) TokenCodes<kDim, kTokens, 4, kIsV>::read(row, codes, slot);
  else if (bits == 3) TokenCodes<kDim, kTokens, 3, kIsV>::read(row, codes, slot);
  else TokenCodes<kDim, kTokens, 2, kIsV>::read(row, codes, slot);
}

template <int kDim, int kTokens, bool kIsV>
__device__ __forceinline__ void write_codes(const Row<kDim, kIsV>& row, char* codes, int slot, int bits) {
  if (bits == 8) TokenCodes<kDim, kTokens, 8, kIsV>::write(row, codes, slot);
  else if (bits == 4) TokenCodes<kDim, kTokens, 4, kIsV>::write(row, codes, slot);
  else if (bits == 3) TokenCodes<kDim, kTokens, 3, kIsV>::write(row, codes, slot);
  else TokenCodes<kDim, kTokens, 2, kIsV>::write(row, codes, slot);
}

// A row in memory; zeros beyond its end.
template <class In, int kDim, bool kIsV>
__device__ __forceinline__ void read_row(Row<kDim, kIsV>& row, const In* from) {
  using R = Row<kDim, kIsV>;
#pragma unroll
  for (int i = 0; i < R::kPer; i++)
#pragma unroll
    for (int e = 0; e < R::kValues; e++) row.x[i][e] = R::active(i) ? to_float(from[R::dim(i, e)]) : 0.f;
}

// Butterflies over bit kBit of the cell number.
template <int kBit, int kDim, bool kIsV>
__device__ __forceinline__ void across_cells(Row<kDim, kIsV>& row) {
  using R = Row<kDim, kIsV>;
  if constexpr (kBit < 5) {
    const bool upper = threadIdx.x >> kBit & 1;
#pragma unroll
    for (int i = 0; i < R::kPer; i++)
#pragma unroll
      for (int e = 0; e < R::kValues; e++) {
        const float own = row.x[i][e], other = __shfl_xor_sync(~0u, own, 1 << kBit);
        row.x[i][e] = upper ? __fsub_rn(other, own) : __fadd_rn(own, other);
      }
  } else {
#pragma unroll
    for (int i = 0; i < R::kPer; i++)
      if (!(i >> (kBit - 5) & 1))
#pragma unroll
        for (int e = 0; e < R::kValues; e++) butterfly(row.x[i][e], row.x[i + (1 << (kBit - 5))][e]);
  }
}

// Butterflies over bit kBit of the index of a value in its cell.
template <int kBit, int kDim, bool kIsV>
__device__ __forceinline__ void in_cells(Row<kDim, kIsV>& row) {
  using R = Row<kDim, kIsV>;
#pragma unroll
  for (int i = 0; i < R::kPer; i++)
#pragma unroll
    for (int e = 0; e < R::kValues; e++)
      if (!(e >> kBit & 1)) butterfly(row.x[i][e], row.x[i][e + (1 << kBit)]);
}

// The rotation. Distances 1, 2, 4 and 8 of dims: K has half, t, t, 8 (the second pair); V has g, g, g, 8. The rest are cells.
template <int kDim, bool kIsV>
__device__ __forceinline__ void rotate_row(Row<kDim, kIsV>& row) {
  constexpr int kBlock = kDim & -kDim, kFirst = kIsV ? 3 : 2;
  if constexpr (kIsV) {
    across_cells<0>(row);
    across_cells<1>(row);
    across_cells<2>(row);
    in_cells<0>(row);
  } else {
    in_cells<0>(row);
    across_cells<0>(row);
    across_cells<1>(row);
    in_cells<1>(row);
  }
  if constexpr (kBlock >= 32) across_cells<kFirst>(row);
  if constexpr (kBlock >= 64) across_cells<kFirst + 1>(row);
  if constexpr (kBlock >= 128) across_cells<kFirst + 2>(row);
  if constexpr (kBlock >= 256) across_cells<kFirst + 3>(row);
}

// A plain row, transformed.
template <class In, int kDim, bool kIsV, bool kRotate, bool kCentre>
__device__ __forceinline__ void transform_row(Row<kDim, kIsV>& row, const In* from, const float* centre) {
  using R = Row<kDim, kIsV>;
  read_row<In>(row, from);
  float most = 0.f;
#pragma unroll
  for (int i = 0; i < R::kPer; i++)
#pragma unroll
    for (int e = 0; e < R::kValues; e++) {
      row.x[i][e] = clean(row.x[i][e]);
      most = fmaxf(most, fabsf(row.x[i][e]));
    }
  if constexpr (kRotate) {
    const float magic = grid_of<kDim>(warp_max(most));
#pragma unroll
    for (int i = 0; i < R::kPer; i++)
#pragma unroll
      for (int e = 0; e < R::kValues; e++) row.x[i][e] = on_grid(row.x[i][e], magic);
    rotate_row(row);
  }
  if constexpr (kCentre) {
    R mean;
    read_row<f32>(mean, reinterpret_cast<const f32*>(centre));
    if constexpr (kRotate) rotate_row(mean);
#pragma unroll
    for (int i = 0; i < R::kPer; i++)
#pragma unroll
      for (int e = 0; e < R::kValues; e++) row.x[i][e] = __fsub_rn(row.x[i][e], mean.x[i][e]);
  }
}

// Sum of squares in the order of row_sum of quant/reference.py: dims 8 apart, steps (those of a lane, then of lanes), dims 1, 4
// and 2 apart.
template <int kDim, bool kIsV>
__device__ __forceinline__ float square_sum(const Row<kDim, kIsV>& row) {
  using R = Row<kDim, kIsV>;
  constexpr int kHalves = R::kValues / 2;
  float part[4][kHalves] = {};
#pragma unroll
  for (int i = 0; i < R::kPer; i++)
#pragma unroll
    for (int h = 0; h < kHalves; h++) {
      const float x = row.x[i][h], y = row.x[i][h + kHalves];
      part[i][h] = __fadd_rn(__fmul_rn(x, x), __fmul_rn(y, y));
    }
#pragma unroll
  for (int h = 0; h < kHalves; h++) {
    if constexpr (R::kPer > 2) part[0][h] = __fadd_rn(part[0][h], part[2][h]), part[1][h] = __fadd_rn(part[1][h], part[3][h]);
    if constexpr (R::kPer > 1) part[0][h] = __fadd_rn(part[0][h], part[1][h]);
    part[0][h] = add_lanes(add_lanes(part[0][h], 16), 8);
    if constexpr (!kIsV) part[0][h] = add_lanes(part[0][h], 4);
  }
  if constexpr (kIsV) return add_lanes(add_lanes(add_lanes(part[0][0], 1), 4), 2);
  else return add_lanes(add_lanes(__fadd_rn(part[0][0], part[0][1]), 2), 1);
}

// A value in 1/256 steps; `inverse` is 256 / step.
__device__ __forceinline__ int in_steps(float x, float inverse) {
  return __float_as_int(__fmaf_rd(x, inverse, kMagic)) - kMagicBits;
}

// Codes of K with a direction, `aim` in quant/reference.py. `half`: of the number of codes.
template <int kDim>
__device__ __forceinline__ void aim(Row<kDim, false>& row, float inverse, const signed char* direction, int half,
                                    int per_gain) {
  using R = Row<kDim, false>;
  int base[R::kPer][R::kValues], weight[R::kPer][R::kValues], along = 0, weights = 0;
#pragma unroll
  for (int i = 0; i < R::kPer; i++)
#pragma unroll
    for (int e = 0; e < R::kValues; e++) {
      const int z = in_steps(row.x[i][e], inverse), w = R::active(i) ? direction[R::dim(i, e)] : 0;
      base[i][e] = 8 * max(64 - 256 * half, min(z, 256 * half - 64)) + 2048 * half;
      weight[i][e] = w;
      along += z * w;
      weights += w;
    }
  const i64 of_row = static_cast<i64>(__reduce_add_sync(~0u, along)) * per_gain >> 12;
  const int wanted = static_cast<int>(of_row) + (256 * half - 128) * __reduce_add_sync(~0u, weights);
  const auto rest_of = [&](int shift) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < R::kPer; i++)
#pragma unroll
      for (int e = 0; e < R::kValues; e++) sum += weight[i][e] * (base[i][e] + shift * weight[i][e] >> 11);
    return wanted - 256 * __reduce_add_sync(~0u, sum);
  };
  int rest = rest_of(0), least = abs(rest), shift = 0, best = 0;
#pragma unroll 1
  for (int size = 8; size; size >>= 1) {
    shift += rest > 0 ? size : -size;
    rest = rest_of(shift);
    if (abs(rest) < least) {
      least = abs(rest);
      best = shift;
    }
  }
#pragma unroll
  for (int i = 0; i < R::kPer; i++)
#pragma unroll
    for (int e = 0; e < R::kValues; e++)
      row.code[i][e] = static_cast<unsigned char>(base[i][e] + best * weight[i][e] >> 11);
}

// Values to codes; returns the bits of the fp16 scale. `length`: makes rows as long as before the rotation. `direction`: of K
// with 2, 3 or 4 bits, or null.
template <int kDim, bool kIsV>
__device__ __forceinline__ unsigned short encode(Row<kDim, kIsV>& row, int bits, float gaussian, float gain, float length,
                                                 const signed char* direction, int per_gain) {
  using R = Row<kDim, kIsV>;
  float step;
  if (bits == 8) {
    float most = 0.f;
#pragma unroll
    for (int i = 0; i < R::kPer; i++)
#pragma unroll
      for (int e = 0; e < R::kValues; e++) most = fmaxf(most, fabsf(row.x[i][e]));
    step = __fmul_rn(warp_max(most), 2.f / 255.f);
  } else {
    step = __fmul_rn(__fsqrt_rn(__fdiv_rn(square_sum(row), static_cast<float>(kDim))), gaussian);
  }
  step = fmaxf(step, __fdiv_rn(kSmallestStep, length));
  const float inverse = 256.f * __frcp_rn(step);
  const int half = 1 << (bits - 1);
  const bool aims = !kIsV && direction;
  if constexpr (!kIsV)
    if (aims) aim<kDim>(row, inverse, direction, half, per_gain);
  int dot = 0, square = 0;
#pragma unroll
  for (int i = 0; i < R::kPer; i++) {
    if (!R::active(i)) continue;
#pragma unroll
    for (int e = 0; e < R::kValues; e++) {
      const int z = in_steps(row.x[i][e], inverse);
      if (!aims) row.code[i][e] = static_cast<unsigned char>(max(-half, min(z >> 8, half - 1)) + half);
      const int level = 2 * (row.code[i][e] - half) + 1;
      dot += z * level;
      square += level * level;
    }
  }
  const int dots = __reduce_add_sync(~0u, dot), squares = __reduce_add_sync(~0u, square);
  const float ratio = __fdiv_rn(static_cast<float>(dots), static_cast<float>(squares));
  return scale_of(__fmul_rn(ratio, __fmul_rn(step, __fmul_rn(length, gain) / 128.f)));
}

template <class In, int kDim, int kTokens, class Position, bool kKeeps, bool kRotate, bool kCentre, bool kIsV>
__device__ __forceinline__ void move_side(const Params& p, int move) {
  using R = Row<kDim, kIsV>;
  constexpr int kRow = kDim * sizeof(In);
  constexpr float kLength = rotation_factor<kDim / 16, kRotate>();
  const int lane = threadIdx.x & 31;
  const int4* line = reinterpret_cast<const int4*>(p.packed + static_cast<i64>(move) * 12);
  const int4 from = __ldg(line), to = __ldg(line + 1), more = __ldg(line + 2);
  const int source_slot = from.y, source_tier = from.z, slot = to.x, tier = to.y;
  const Tier &old = p.tiers[max(source_tier, 0)], &now = p.tiers[tier];
  const char* source = page_address(p.pointers, p.units, from.x);
  char* page = page_address(p.pointers, p.units, from.w);
  const char* plain = source_tier < 0 ? (kIsV ? p.v + source_slot * p.v_row : p.k + source_slot * p.k_row)
                                      : source + (kIsV ? old.v_offset : 0) + source_slot * kRow;
  if (!kIsV && lane == 0) {
    reinterpret_cast<Position*>(page + now.position_offset)[slot] = static_cast<Position>(more.y);
    if constexpr (kKeeps) reinterpret_cast<int*>(page + now.importance_offset)[slot] = more.z;
  }
  if (tier == 0) {
    char* out = page + (kIsV ? now.v_offset : 0) + slot * kRow;
#pragma unroll
    for (int i = 0; i < kDim; i += 32)  // a new row may only be aligned to its elements
      if (kDim % 32 == 0 || i + lane < kDim)
        reinterpret_cast<In*>(out)[i + lane] = reinterpret_cast<const In*>(plain)[i + lane];
    return;
  }
  R row;
  const int bits = kIsV ? now.v_bits : now.k_bits;
  unsigned short scale;
  bool keeps_codes = false;
  if (source_tier > 0) {
    const int was = kIsV ? old.v_bits : old.k_bits;
    read_codes<kDim, kTokens, kIsV>(row, source + (kIsV ? old.v_offset : 0), source_slot, was);
    scale = reinterpret_cast<const unsigned short*>(source + old.scale_offset)[scale_index(source_slot, kIsV)];
    keeps_codes = was == bits;
    const float factor = __fmul_rn(to_float(f16{scale}), 1.f / kLength), centre = 0.5f * static_cast<float>((1 << was) - 1);
#pragma unroll
    for (int i = 0; i < R::kPer; i++)
#pragma unroll
      for (int e = 0; e < R::kValues; e++)
        row.x[i][e] = R::active(i) ? __fmul_rn(static_cast<float>(row.code[i][e]) - centre, factor) : 0.f;
  } else {
    const float* centre = p.centre + static_cast<i64>(to.z) * kDim;
    transform_row<In, kDim, kIsV, kRotate, kCentre && !kIsV>(row, reinterpret_cast<const In*>(plain), centre);
  }
  if (!keeps_codes) {
    const signed char* direction = kIsV || !p.direction || bits == 8 ? nullptr : p.direction + static_cast<i64>(to.z) * kDim;
    const float gain = kIsV ? p.v_gain[bits] : p.k_gain[bits];
    scale = encode<kDim, kIsV>(row, bits, p.step[bits], gain, kLength, direction, p.per_k_gain[bits]);
  }
  write_codes<kDim, kTokens, kIsV>(row, page + (kIsV ? now.v_offset : 0), slot, bits);
  if (lane == 0) reinterpret_cast<unsigned short*>(page + now.scale_offset)[scale_index(slot, kIsV)] = scale;
}

template <class In, int kDim, int kTokens, class Position, bool kKeeps, bool kRotate, bool kCentre>
__global__ void __launch_bounds__(256, 4) repack(const __grid_constant__ Params p) {
  const int warp = blockIdx.x * 8 + (threadIdx.x >> 5), move = warp >> 1;
  if (move >= p.n) return;
  if (warp & 1) move_side<In, kDim, kTokens, Position, kKeeps, kRotate, kCentre, true>(p, move);
  else move_side<In, kDim, kTokens, Position, kKeeps, kRotate, kCentre, false>(p, move);
}
