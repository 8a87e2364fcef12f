// Codes of a page (layout/fragments.py) to operands of the tensor cores, in one or two instructions a register.
//
// A code that is masked out of its word is, read as fp16, a subnormal: code * 2^-24 where it stands in the lowest
// bits, 2^-22 two bits higher, and so on. Products with subnormals are exact, so K needs nothing but the masks: what
// the code's place multiplies by is taken back in the scale of the token, and the middle of the levels by the sum of
// the query. For V one fused multiply-add makes (code - middle) * 2^-9, exactly.
#pragma once

// Words of one lane: a tile's, of a part of a page with kTiles tiles. Both planes of 3-bit codes.
template <int kBits, int kSteps, int kTiles>
struct Words {
  static constexpr int kLowBits = kBits == 3 ? 2 : kBits;
  static constexpr int kLowWords = (kTiles * kSteps * kLowBits + 3) / 4;
  static constexpr int kHighWords = kBits == 3 ? (kTiles * kSteps + 3) / 4 : 0;
  static constexpr int kAll = kLowWords + kHighWords;
  static constexpr int kBytes = kAll * 128;
  static constexpr bool kWhole = kSteps * kLowBits % 4 == 0 && (kBits != 3 || kSteps % 4 == 0);  // tiles share no word
  static constexpr int kLowCount = kWhole ? kSteps * kLowBits / 4 : kSteps * kLowBits / 4 + 2;
  static constexpr int kHighCount = kBits != 3 ? 1 : kWhole ? kSteps / 4 : kSteps / 4 + 2;
  unsigned low[kLowCount], high[kHighCount];

  static __device__ __forceinline__ int address(int w) {
    constexpr int kChunked = kAll / 4 * 4, kRest = kAll % 4;
    const int lane = threadIdx.x & 31;
    if (w < kChunked) return w / 4 * 512 + lane * 16 + w % 4 * 4;
    if (kRest >= 2 && w - kChunked < 2) return kChunked * 128 + lane * 8 + (w - kChunked) * 4;
    return kChunked * 128 + (kRest == 3 ? 256 : 0) + lane * 4;
  }

  // Words first .. first + kCount - 1; kAligned: both are multiples of it, and no narrow chunks follow.
  template <int kCount, int kAligned>
  static __device__ __forceinline__ void load(const unsigned char* from, int first, unsigned* words) {
#pragma unroll
    for (int i = 0; i < kCount; i += kAligned) {
      const int w = first + i;
      if constexpr (kAligned == 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + address(w));
        words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
      } else if constexpr (kAligned == 2) {
        const uint2 x = *reinterpret_cast<const uint2*>(from + address(w));
        words[i] = x.x, words[i + 1] = x.y;
      } else {
        words[i] = w < kAll ? *reinterpret_cast<const unsigned*>(from + address(w)) : 0u;
      }
    }
  }

  static __device__ constexpr int aligned(int count, int first) {
    return !kWhole || kAll % 4 ? 1 : count % 4 == 0 && first % 4 == 0 ? 4 : count % 2 == 0 && first % 2 == 0 ? 2 : 1;
  }

  // `tile` is known at compile time once loops are unrolled.
  __device__ __forceinline__ void load_tile(const unsigned char* from, int tile) {
    load<kLowCount, aligned(kLowCount, 0)>(from, tile * kSteps * kLowBits / 4, low);
    if constexpr (kBits == 3) load<kHighCount, aligned(kHighCount, kLowWords)>(from, kLowWords + tile * kSteps / 4, high);
  }

  // The masked codes of step `s` of the tile.
  __device__ __forceinline__ void codes(int tile, int s, unsigned (&a)[4]) const {
    const int j = tile * kSteps + s, base = tile * kSteps * kLowBits / 4;
    if constexpr (kBits == 8) {
      const unsigned x = low[2 * j - base], y = low[2 * j + 1 - base];
      a[0] = __byte_perm(x, 0u, 0x4140);
      a[1] = __byte_perm(x, 0u, 0x4342);
      a[2] = __byte_perm(y, 0u, 0x4140);
      a[3] = __byte_perm(y, 0u, 0x4342);
    } else if constexpr (kBits == 4) {
      const unsigned x = low[j - base], y = x >> 8;
      a[0] = x & 0x000f000fu;
      a[1] = x & 0x00f000f0u;
      a[2] = y & 0x000f000fu;
      a[3] = y & 0x00f000f0u;
    } else {
      const unsigned word = low[j / 2 - base], x = j % 2 ? word >> 8 : word;
#pragma unroll
      for (int r = 0; r < 4; r++) a[r] = x & 0x00030003u << 2 * r;
      if constexpr (kBits == 3) {
        const int q = j % 4, turn = q % 2 + q / 2 * 8;
        const unsigned h = high[j / 4 - tile * kSteps / 4], z = turn ? __funnelshift_r(h, h, turn) : h;
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] |= z & 0x00040004u << 2 * r;
      }
    }
  }
};

// What a code in register r is multiplied by: 2^-kPlace.
template <int kBits>
__device__ __forceinline__ constexpr int place(int r) {
  return kBits == 8 ? 24 : kBits == 4 ? 24 - 4 * (r & 1) : 24 - 2 * r;
}

// K: registers 0 and 2 are one token, 1 and 3 the other. In 2- and 3-bit codes registers 2 and 3 stand four bits
// higher than 0 and 1; the second half of the query is made smaller by that.
template <int kBits> constexpr int kQueryShift = kBits <= 3 ? 4 : 0;

template <int kBits>
__device__ __forceinline__ constexpr float middle() { return kBits == 8 ? 127.5f : kBits == 4 ? 7.5f : kBits == 3 ? 3.5f : 1.5f; }

// Both halves: a * 2^exponent + c.
template <int kBits>
__device__ __forceinline__ void centre_codes(unsigned (&a)[4]) {
  constexpr unsigned kMiddle = kBits == 8 ? 0xb3f8u : kBits == 4 ? 0xa380u : kBits == 3 ? 0x9f00u : 0x9a00u;  // * -2^-9
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const unsigned power = static_cast<unsigned>(place<kBits>(r) - 9 + 15) << 10;
    asm("fma.rn.f16x2 %0,%0,%1,%2;" : "+r"(a[r]) : "r"(power | power << 16), "r"(kMiddle | kMiddle << 16));
  }
}
constexpr float kCentredUnit = 512.f;  // what centred codes are too small by
