// Codes of a page (layout/fragments.py) to operands of the tensor cores, in one or two instructions per register.
//
// A code that is masked out of its word is, read as fp16, a subnormal: code * 2^-24 in the lowest bits, code * 2^-22 two bits
// higher, and so on. Products with subnormals are exact, so only the masks are needed: the factor of the code's position is
// compensated in scales, and the middle of the levels by the sum of the other operand.
#pragma once
#include "page.cuh"

// Words of one lane: those of kSpan tiles that are read together, in a part of a page with kTiles tiles. Both planes of
// 3-bit codes.
template <int kBits, int kSteps, int kTiles, int kSpan>
struct Words {
  static constexpr int kLowBits = kBits == 3 ? 2 : kBits, kFragments = kSpan * kSteps;
  static constexpr int kLowWords = plane_words(kLowBits, kTiles * kSteps), kAll = words_per_lane(kBits, kTiles * kSteps);
  // Units are whole chunks, or halves of one: the same code handles all.
  static constexpr int kLowUnit = kFragments * kLowBits / 4, kHighUnit = kFragments / 4;
  static constexpr bool kRegular = kAll % 4 == 0 && kFragments * kLowBits % 4 == 0 && (kLowUnit % 4 == 0 || kLowUnit == 2) &&
                                   (kBits != 3 || (kFragments % 4 == 0 && kLowWords % 4 == 0 &&
                                                   (kHighUnit % 4 == 0 || kHighUnit == 2)));
  static constexpr int kLowCount = kFragments * kLowBits / 4 + (kRegular ? 0 : 2);
  static constexpr int kHighCount = kBits != 3 ? 1 : kFragments / 4 + (kRegular ? 0 : 2);
  unsigned low[kLowCount], high[kHighCount];

  // Words first .. first + kCount - 1.
  template <int kCount>
  static __device__ __forceinline__ void load(const unsigned char* from, int first, unsigned* words) {
    if constexpr (kRegular) {
      constexpr int kAligned = kCount % 4 == 0 ? 4 : 2;
      const unsigned char* base = from + first / 4 * 512 + (threadIdx.x & 31) * 16 + first % 4 * 4;
#pragma unroll
      for (int i = 0; i < kCount; i += kAligned) {
        if constexpr (kAligned == 4) {
          const uint4 x = *reinterpret_cast<const uint4*>(base + i * 128);
          words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
        } else {
          const uint2 x = *reinterpret_cast<const uint2*>(base + i / 4 * 512 + i % 4 * 4);
          words[i] = x.x, words[i + 1] = x.y;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; i++)
        words[i] = first + i < kAll ? *reinterpret_cast<const unsigned*>(from + word_address<kAll>(first + i, threadIdx.x & 31)) : 0u;
    }
  }

  __device__ __forceinline__ void load_span(const unsigned char* from, int span) {
    load<kLowCount>(from, span * kFragments * kLowBits / 4, low);
    if constexpr (kBits == 3) load<kHighCount>(from, kLowWords + span * kFragments / 4, high);
  }

  // The masked codes of step `s` of a tile of the span. If spans are not regular, `span` is known at compile time.
  __device__ __forceinline__ void codes(int span, int tile, int s, unsigned (&a)[4]) const {
    const int before = kRegular ? 0 : span * kFragments, j = before + tile * kSteps + s, base = before * kLowBits / 4;
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
        const unsigned h = high[j / 4 - before / 4], z = turn ? __funnelshift_r(h, h, turn) : h;
#pragma unroll
        for (int r = 0; r < 4; r++) a[r] |= z & 0x00040004u << 2 * r;
      }
    }
  }
};

// Factor of a code in register r: 2^-kPlace.
template <int kBits>
__device__ __forceinline__ constexpr int place(int r) {
  return kBits == 8 ? 24 : kBits == 4 ? 24 - 4 * (r & 1) : 24 - 2 * r;
}

// K: registers 0 and 2 are one token, 1 and 3 the other. In 2- and 3-bit codes registers 2 and 3 are four bits
// higher than 0 and 1; the second half of the query is scaled down by that.
template <int kBits> constexpr int kQueryShift = kBits <= 3 ? 4 : 0;

// V: same for the weights of tokens 8 to 15.
template <int kBits> constexpr float kSecondHalf = kBits <= 3 ? 0.0625f : 1.f;

template <int kBits>
__device__ __forceinline__ constexpr float middle() { return kBits == 8 ? 127.5f : kBits == 4 ? 7.5f : kBits == 3 ? 3.5f : 1.5f; }
