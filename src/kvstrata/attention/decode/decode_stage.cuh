// Loading of pages: split into stages that fit a slot of the ring, and copied from global memory.
#pragma once
#include "decode_state.cuh"
#include "page.cuh"
#include "ring.cuh"

// One tier: widths of K and V; 16 bits are plain rows of In.
template <int kKBits, int kVBits>
struct Tier {
  static constexpr int kK = kKBits, kV = kVBits;
  static constexpr bool kPlain = kKBits == 16;
};

// Split of a tier's page into stages of kTokens tokens. kByPosition: visibility depends on positions.
template <class T, int kDim, int kPageTokens, bool kByPosition = false>
struct Part {
  static constexpr bool kOrdered = kByPosition, kConsecutive = false;  // positions of a stage: stored, or consecutive
  static constexpr bool kSkips = false;  // True if positions before State::skip are hidden
  static constexpr int kSteps = kDim / 16, kTiles = kPageTokens / 16, kLimit = 8704;
  template <int kBits> static constexpr bool whole_tiles = kSteps * kBits % 16 == 0 && kBits != 3;
  static constexpr bool kCuts = T::kPlain || (whole_tiles<T::kK> && whole_tiles<T::kV>);
  static __device__ constexpr int bytes_of(int tiles) {
    return T::kPlain ? tiles * 16 * kDim * 4
                     : code_bytes(T::kK, tiles * kSteps) + code_bytes(T::kV, tiles * kSteps) + tiles * kTileScaleBytes;
  }
  static __device__ constexpr int tiles_of() {
    int tiles = kTiles;
    while (kCuts && tiles > 1 && bytes_of(tiles) > kLimit) tiles /= 2;
    return tiles;
  }
  static constexpr int kMine = tiles_of(), kTokens = kMine * 16, kParts = kTiles / kMine;
  static constexpr int kKBytes = T::kPlain ? kTokens * kDim * 2 : code_bytes(T::kK, kMine * kSteps);
  static constexpr int kVBytes = T::kPlain ? kTokens * kDim * 2 : code_bytes(T::kV, kMine * kSteps);
  static constexpr int kScaleBytes = T::kPlain ? 0 : kMine * kTileScaleBytes;
  static constexpr int kBytes = kKBytes + kVBytes + kScaleBytes;  // positions follow
  static constexpr int kPageBytes = bytes_of(kTiles);
};

template <class... Ts> struct Tiers {};

// Bytes of a slot of the ring: the largest stage of any tier, and positions.
template <int kDim, int kPageTokens, class... Ts>
__device__ constexpr int slot_bytes(Tiers<Ts...>) {
  int most = 0;
  ((most = Part<Ts, kDim, kPageTokens>::kBytes > most ? Part<Ts, kDim, kPageTokens>::kBytes : most), ...);
  return most + kPageTokens * 4;
}

// Bytes of a tier's stage (K, V, scales), and stages per page.
struct Sizes {
  int k, v, scales, parts, tokens;
};
template <int kDim, int kPageTokens, class... Ts>
__device__ __forceinline__ Sizes sizes_of(Tiers<Ts...>, int tier) {
  Sizes sizes = {};
  int number = 0;
  (
      [&] {
        using P = Part<Ts, kDim, kPageTokens>;
        if (tier == number++) sizes = {P::kKBytes, P::kVBytes, P::kScaleBytes, P::kParts, P::kTokens};
      }(),
      ...);
  return sizes;
}

template <bool kMass>
__device__ __forceinline__ void fill(Ring<2>& ring, int buffer, unsigned char* to, const Stage& stage, const Sizes& size,
                                     int position_bytes) {
  if (!ring.mine()) return;
  const char* page = reinterpret_cast<const char*>(stage.page);
  const int positions = size.tokens * position_bytes, codes = size.k + size.v + size.scales;
  ring.begin(buffer, codes + positions - (kMass ? size.v : 0));
  if (size.parts == 1 && !kMass) {
    ring.copy(buffer, to, page, codes + positions);
  } else {
    const int part = part_of(stage.meta);
    ring.copy(buffer, to, page + part * size.k, size.k);
    if (!kMass) ring.copy(buffer, to + size.k, page + size.parts * size.k + part * size.v, size.v);
    if (size.scales) ring.copy(buffer, to + size.k + size.v, page + size.parts * (size.k + size.v) + part * size.scales, size.scales);
    if (positions) ring.copy(buffer, to + codes, page + size.parts * codes + part * positions, positions);
  }
}

// Rows of a page of store_kv: one copy if they are contiguous, else one row of K and of V per lane.
template <bool kMass, int kDim>
__device__ __forceinline__ void fill_rows(const Params& p, Ring<2>& ring, int buffer, unsigned char* to, const Stage& stage,
                                          const Sizes& size) {
  constexpr int kRow = kDim * 2;
  const int lane = threadIdx.x & 31, tokens = tokens_of(stage.meta), sides = kMass ? 1 : 2;
  const char* rows = reinterpret_cast<const char*>(stage.page);
  if (ring.mine()) ring.begin(buffer, sides * tokens * kRow);
  if (p.row_bytes == kRow) {
    if (!ring.mine()) return;
    ring.copy(buffer, to, rows, tokens * kRow);
    if (!kMass) ring.copy(buffer, to + size.k, rows + p.v_offset, tokens * kRow);
    return;
  }
  __syncwarp();
  for (int i = lane; i < sides * tokens; i += 32) {
    const int side = i >= tokens, token = i - side * tokens;
    ring.copy_of_lane(buffer, to + side * size.k + token * kRow, rows + side * p.v_offset + token * p.row_bytes, kRow);
  }
}
