// Tokens of a tile given as codes of another tier: decoded into the tile's registers, where transformed rows are.
#pragma once
#include "coded.cuh"
#include "planes.cuh"
#include "quantize_encode.cuh"

struct Tier {
  int k_bits, v_bits, v_offset, scale_offset;
};

// Tokens of a lane given as codes.
template <int kDim, int kTokens, bool kIsV>
struct Coded {
  static constexpr int kSteps = kDim / 16, kRows = TileTokens<kIsV>::kRows;
  const char* codes[kRows];
  int slot[kRows], bits[kRows], scale[kRows];  // 0 bits: none

  // `rows`: of the tile.
  __device__ __forceinline__ Coded(const i64* rows, const Tier* tiers) {
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
    for (int i = 0; i < kRows; i++) {
      const i64 row = __ldg(rows + (kIsV ? 2 * t + (i & 1) + 8 * (i >> 1) : g + 8 * i));
      bits[i] = scale[i] = slot[i] = 0;
      codes[i] = nullptr;
      if (!is_coded(row)) continue;
      const Tier& tier = tiers[coded_tier(row)];
      const char* page = coded_page(row);
      slot[i] = coded_slot(row);
      bits[i] = kIsV ? tier.v_bits : tier.k_bits;
      codes[i] = page + (kIsV ? tier.v_offset : 0);
      scale[i] = reinterpret_cast<const unsigned short*>(page + tier.scale_offset)[scale_index(slot[i], kIsV)];
    }
  }

  // Scale of the lane's own token if its codes keep their number of bits, else -1.
  __device__ __forceinline__ int kept(int wanted) const {
    const int lane = threadIdx.x & 31, own = kIsV ? (lane >> 2 & 1) * 2 + (lane >> 4) : lane >> 1 & 1;
    int same_width = -1;
#pragma unroll
    for (int i = 0; i < kRows; i++)
      if (own == i && bits[i] == wanted) same_width = scale[i];
    return same_width;
  }

  template <int kWidth, int kWords>
  __device__ __forceinline__ void load(unsigned (&x)[kSteps][2], int i, bool live) const {
    using P = Plane<kDim, kTokens, kWidth, kIsV>;
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, token = slot[i] & 15;
    const int lane = kIsV ? 4 * g + ((token & 7) >> 1) : 4 * (token & 7) + t;
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int q = 0; q < P::kPairs; q++) {
        const int word = P::word(slot[i] / 16 * kSteps + s, token) + q;
        x[s][q] = live ? *reinterpret_cast<const unsigned*>(codes[i] + word_address<kWords>(word, lane)) : 0u;
      }
  }

  // Decodes tokens with kBits bits, times `times`, to their place in the tile; the words of two tokens are in flight
  // together.
  template <int kBits>
  __device__ __forceinline__ void put(Tile<kSteps>& f, float times) const {
    constexpr int kWords = words_per_lane(kBits, kSteps * (kTokens / 16)), kWidth = kBits == 3 ? 2 : kBits;
    using P = Plane<kDim, kTokens, kWidth, kIsV>;
    using Top = Plane<kDim, kTokens, 1, kIsV>;  // of 3 bits
    bool any = false;
#pragma unroll
    for (int i = 0; i < kRows; i++) any |= bits[i] == kBits;
    if (!__any_sync(~0u, any)) return;
#pragma unroll
    for (int first = 0; first < kRows; first += 2) {
      unsigned x[2][kSteps][2], top[2][kSteps][2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        load<kWidth, kWords>(x[i], first + i, bits[first + i] == kBits);
        if constexpr (kBits == 3) load<1, kWords>(top[i], first + i, bits[first + i] == kBits);
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int which = first + i, token = slot[which] & 15, tile = slot[which] / 16 * kSteps;
        const float factor = to_float(f16{static_cast<unsigned short>(scale[which])}) * times;
#pragma unroll
        for (int s = 0; s < kSteps; s++)
#pragma unroll
          for (int r = 0; r < 4; r++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
              if (TileTokens<kIsV>::row(r, half) != which) continue;
              const int e = kIsV ? r & 1 : (r >> 1) * 2 + half;
              unsigned code = x[i][s][P::kPairs == 2 ? e >> 1 : 0] >> P::shift(tile + s, token, e) & ((1u << kWidth) - 1);
              if constexpr (kBits == 3) code |= (top[i][s][0] >> Top::shift(tile + s, token, e) & 1) << 2;
              const float value = (static_cast<float>(code) - 0.5f * ((1 << kBits) - 1)) * factor;
              if (bits[which] == kBits) f[s][r][half] = value;
            }
      }
    }
  }

  __device__ __forceinline__ void put_all(Tile<kSteps>& f, float times) const {
    put<8>(f, times);
    put<4>(f, times);
    put<3>(f, times);
    put<2>(f, times);
  }
};
