// Moves single tokens from page to page: decodes, encodes for another tier and writes one side of one move per warp.
//
// No move of a launch writes where another reads (cache/move/phases.py). Moves do share 32-bit words of codes: a warp adds
// the difference of its own fields to a word. Sums of such differences are correct in any order, and a field that no
// move changes is the same in every intermediate sum, so words may be read at any time.
//
// A lane holds cells of the token (planes.cuh). The arithmetic is that of quant/reference.py, the butterflies in the
// order of layout/rotation.py.
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
  i64 k_row, v_row;     // strides in bytes
  int n, units;
  float step[9], k_gain[9], v_gain[9];  // by width: the step for a unit Gaussian, the gains of scales
  Tier tiers[kMaxTiers];
};

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x += __shfl_xor_sync(~0u, x, d);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

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

// A plain row, centred and cleaned.
template <class In, int kDim, bool kIsV>
__device__ __forceinline__ void read_plain(Row<kDim, kIsV>& row, const char* from, const float* centre) {
  using R = Row<kDim, kIsV>;
#pragma unroll
  for (int i = 0; i < R::kPer; i++)
#pragma unroll
    for (int e = 0; e < R::kValues; e++) {
      float x = 0.f;
      if (R::active(i)) {
        x = to_float(reinterpret_cast<const In*>(from)[R::dim(i, e)]);
        if (centre) x = __fsub_rn(x, __ldg(centre + R::dim(i, e)));
      }
      row.x[i][e] = clean(x);
    }
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

// Distances 1, 2, 4, .. of dims: K has half, t, t, 8 (the second pair), steps; V has g, g, g, 8, steps.
template <int kDim, bool kIsV>
__device__ __forceinline__ void rotate_row(Row<kDim, kIsV>& row) {
  constexpr int kBlock = kDim & -kDim;
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
  constexpr int kFirst = kIsV ? 3 : 2;
  if constexpr (kBlock >= 32) across_cells<kFirst>(row);
  if constexpr (kBlock >= 64) across_cells<kFirst + 1>(row);
  if constexpr (kBlock >= 128) across_cells<kFirst + 2>(row);
  if constexpr (kBlock >= 256) across_cells<kFirst + 3>(row);
#pragma unroll
  for (int i = 0; i < Row<kDim, kIsV>::kPer; i++)
#pragma unroll
    for (int e = 0; e < Row<kDim, kIsV>::kValues; e++)
      row.x[i][e] = __fmul_rn(row.x[i][e], rotation_factor<kDim / 16, true>());
}

// Values to codes; returns the bits of the fp16 scale.
template <int kDim, bool kIsV>
__device__ __forceinline__ unsigned short encode(Row<kDim, kIsV>& row, int bits, float gaussian, float gain) {
  using R = Row<kDim, kIsV>;
  float measure = 0.f;
#pragma unroll
  for (int i = 0; i < R::kPer; i++)
#pragma unroll
    for (int e = 0; e < R::kValues; e++)
      measure = bits == 8 ? fmaxf(measure, fabsf(row.x[i][e])) : measure + row.x[i][e] * row.x[i][e];
  float step;
  if (bits == 8) {
    step = __fmul_rn(warp_max(measure), 2.f / 255.f);
  } else {
    step = __fmul_rn(__fsqrt_rn(__fdiv_rn(warp_sum(measure), static_cast<float>(kDim))), gaussian);
  }
  const float inverse = __frcp_rn(fmaxf(step, kSmallestStep));
  const int levels = 1 << bits;
  const float middle = kMagic + static_cast<float>(levels / 2);
  const float centre = 0.5f * static_cast<float>(levels - 1);
  float dot = 0.f, square = 0.f;
#pragma unroll
  for (int i = 0; i < R::kPer; i++) {
    if (!R::active(i)) continue;
#pragma unroll
    for (int e = 0; e < R::kValues; e++) {
      const int code = __float_as_int(__fmaf_rd(row.x[i][e], inverse, middle)) - kMagicBits;
      const int clamped = max(0, min(code, levels - 1));
      row.code[i][e] = static_cast<unsigned char>(clamped);
      const float level = static_cast<float>(clamped) - centre;
      dot += row.x[i][e] * level;
      square += level * level;
    }
  }
  return scale_of(__fmul_rn(__fdiv_rn(warp_sum(dot), warp_sum(square)), gain));
}

template <class In, int kDim, int kTokens, class Position, bool kKeeps, bool kRotate, bool kCentre, bool kIsV>
__device__ __forceinline__ void move_side(const Params& p, int move) {
  using R = Row<kDim, kIsV>;
  constexpr int kRow = kDim * sizeof(In);
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
    const float factor = to_float(f16{scale}), centre = 0.5f * static_cast<float>((1 << was) - 1);
#pragma unroll
    for (int i = 0; i < R::kPer; i++)
#pragma unroll
      for (int e = 0; e < R::kValues; e++)
        row.x[i][e] = R::active(i) ? __fmul_rn(static_cast<float>(row.code[i][e]) - centre, factor) : 0.f;
  } else {
    const float* centre = kCentre && !kIsV ? p.centre + static_cast<i64>(to.z) * kDim : nullptr;
    read_plain<In, kDim, kIsV>(row, plain, centre);
    if constexpr (kRotate) rotate_row<kDim, kIsV>(row);
  }
  if (!keeps_codes) scale = encode<kDim, kIsV>(row, bits, p.step[bits], kIsV ? p.v_gain[bits] : p.k_gain[bits]);
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
