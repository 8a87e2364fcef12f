// Positions of the codes of one token in a page, for a warp that moves it; layout/fragments.py has the order.
//
// A lane holds cells: the part of a word of 4-bit codes that belongs to one token. The values of a cell are dims of one step,
//   K: cell = 4 step + t, values 2t, 2t + 1, 2t + 8, 2t + 9      V: cell = 8 step + g, values g, g + 8
// (t, g: of the lane with which decode loads the word). Words have fields of several tokens, so a writer adds the
// difference of the token's own fields.
#pragma once
#include "page.cuh"

// Cells of a row over the lanes of a warp: cell = lane + 32 i.
template <int kDim, bool kIsV>
struct Row {
  static constexpr int kSteps = kDim / 16, kSub = kIsV ? 8 : 4, kValues = kIsV ? 2 : 4;
  static constexpr int kCells = kSteps * kSub, kPer = (kCells + 31) / 32;
  float x[kPer][kValues];
  unsigned char code[kPer][kValues];

  static __device__ __forceinline__ int cell(int i) { return (threadIdx.x & 31) + 32 * i; }
  static __device__ __forceinline__ bool active(int i) { return kCells % 32 == 0 || cell(i) < kCells; }
  static __device__ __forceinline__ int dim(int i, int e) {
    const int step = cell(i) / kSub, sub = cell(i) % kSub;
    return kIsV ? 16 * step + sub + 8 * e : 16 * step + 2 * sub + (e & 1) + 8 * (e >> 1);
  }
};

// One plane of the codes of a token: fields of kWidth bits, and their positions for fragment j and value e.
template <int kDim, int kTokens, int kWidth, bool kIsV>
struct Plane {
  using R = Row<kDim, kIsV>;
  static constexpr int kFragments = kDim / 16 * (kTokens / 16);
  static constexpr int kPairs = !kIsV && kWidth == 8 ? 2 : 1;  // words of a cell

  // First word and shift; value e is in word (kPairs == 2 ? e / 2 : 0), e-th shift further.
  static __device__ __forceinline__ int word(int j, int token) {
    if constexpr (kWidth == 8) return 2 * j + (kIsV ? token >> 3 : 0);
    else if constexpr (kWidth == 4) return j;
    else if constexpr (kWidth == 2) return j / 2;
    else return plane_words(2, kFragments) + j / 4;
  }
  static __device__ __forceinline__ int shift(int j, int token, int e) {
    // r = 2 (r / 2) + r % 2 and half; the token determines one part and e the other.
    const int high = kIsV ? token >> 3 : e >> 1, low = kIsV ? e : token >> 3, half = kIsV ? token & 1 : e & 1;
    if constexpr (kWidth == 8) return 16 * low + 8 * half;
    else if constexpr (kWidth == 4) return 8 * high + 4 * low + 16 * half;
    else if constexpr (kWidth == 2) return 8 * (j & 1) + 4 * high + 2 * low + 16 * half;
    else return (4 * high + 2 * low + 2 + (j & 1) + 8 * (j >> 1 & 1) + 16 * half) & 31;
  }
  static __device__ __forceinline__ int lane_of(int i, int token) {
    const int sub = R::cell(i) % R::kSub;
    return kIsV ? 4 * sub + ((token & 7) >> 1) : 4 * (token & 7) + sub;
  }

  // The fields of this plane in the codes, from bit kLow on.
  template <int kWords, int kLow>
  static __device__ __forceinline__ void read(R& row, const char* codes, int slot) {
    const int token = slot & 15, first = slot / 16 * R::kSteps;
#pragma unroll
    for (int i = 0; i < R::kPer; i++) {
      if (!R::active(i)) continue;
      const int j = first + R::cell(i) / R::kSub, lane = lane_of(i, token), w = word(j, token);
      unsigned words[kPairs];
#pragma unroll
      for (int q = 0; q < kPairs; q++)
        words[q] = *reinterpret_cast<const unsigned*>(codes + word_address<kWords>(w + q, lane));
#pragma unroll
      for (int e = 0; e < R::kValues; e++) {
        const unsigned field = words[kPairs == 2 ? e >> 1 : 0] >> shift(j, token, e) & ((1u << kWidth) - 1);
        row.code[i][e] = static_cast<unsigned char>((kLow ? row.code[i][e] : 0u) | field << kLow);
      }
    }
  }

  template <int kWords, int kLow>
  static __device__ __forceinline__ void write(const R& row, char* codes, int slot) {
    const int token = slot & 15, first = slot / 16 * R::kSteps;
#pragma unroll
    for (int i = 0; i < R::kPer; i++) {
      if (!R::active(i)) continue;
      const int j = first + R::cell(i) / R::kSub, lane = lane_of(i, token), w = word(j, token);
#pragma unroll
      for (int q = 0; q < kPairs; q++) {
        unsigned* shared_word = reinterpret_cast<unsigned*>(codes + word_address<kWords>(w + q, lane));
        const unsigned old = *shared_word;
        unsigned change = 0;
#pragma unroll
        for (int e = q * (R::kValues / kPairs); e < (q + 1) * (R::kValues / kPairs); e++) {
          const int s = shift(j, token, e);
          const unsigned field = row.code[i][e] >> kLow & ((1u << kWidth) - 1);
          change += (field - (old >> s & ((1u << kWidth) - 1))) << s;
        }
        atomicAdd(shared_word, change);
      }
    }
  }

  // The words with fields of a token.
  using Words = unsigned[R::kPer][kPairs];
  template <int kWords>
  static __device__ __forceinline__ void fetch(Words& words, const char* codes, int slot) {
    const int token = slot & 15, first = slot / 16 * R::kSteps;
#pragma unroll
    for (int i = 0; i < R::kPer; i++) {
      if (!R::active(i)) continue;
      const int w = word(first + R::cell(i) / R::kSub, token), lane = lane_of(i, token);
#pragma unroll
      for (int q = 0; q < kPairs; q++)
        words[i][q] = *reinterpret_cast<const unsigned*>(codes + word_address<kWords>(w + q, lane));
    }
  }
  // Moves the fetched fields of the token at `from` to where `old` was fetched, the token at `slot`.
  template <int kWords>
  static __device__ __forceinline__ void copy(const Words& words, int from, const Words& old, char* codes, int slot) {
    const int source = from & 15, token = slot & 15;
#pragma unroll
    for (int i = 0; i < R::kPer; i++) {
      if (!R::active(i)) continue;
      const int step = R::cell(i) / R::kSub, j = slot / 16 * R::kSteps + step, k = from / 16 * R::kSteps + step;
#pragma unroll
      for (int q = 0; q < kPairs; q++) {
        unsigned change = 0;
#pragma unroll
        for (int e = q * (R::kValues / kPairs); e < (q + 1) * (R::kValues / kPairs); e++) {
          const int s = shift(j, token, e);
          const unsigned mask = (1u << kWidth) - 1;
          change += ((words[i][q] >> shift(k, source, e) & mask) - (old[i][q] >> s & mask)) << s;
        }
        atomicAdd(reinterpret_cast<unsigned*>(codes + word_address<kWords>(word(j, token) + q, lane_of(i, token))), change);
      }
    }
  }
};

// One side of a token's codes, in one plane or for 3 bits in two.
template <int kDim, int kTokens, int kBits, bool kIsV>
struct TokenCodes {
  static constexpr int kWords = words_per_lane(kBits, kDim / 16 * (kTokens / 16));
  using R = Row<kDim, kIsV>;
  using First = Plane<kDim, kTokens, kBits == 3 ? 2 : kBits, kIsV>;
  using Second = Plane<kDim, kTokens, 1, kIsV>;  // of 3 bits
  // Words of the token's source and destination.
  typename First::Words words, old;
  typename Second::Words more, more_old;

  static __device__ __forceinline__ void read(R& row, const char* codes, int slot) {
    First::template read<kWords, 0>(row, codes, slot);
    if constexpr (kBits == 3) Second::template read<kWords, 2>(row, codes, slot);
  }
  static __device__ __forceinline__ void write(const R& row, char* codes, int slot) {
    First::template write<kWords, 0>(row, codes, slot);
    if constexpr (kBits == 3) Second::template write<kWords, 2>(row, codes, slot);
  }
  __device__ __forceinline__ void fetch(const char* from, int source, const char* to, int slot) {
    First::template fetch<kWords>(words, from, source);
    First::template fetch<kWords>(old, to, slot);
    if constexpr (kBits == 3) {
      Second::template fetch<kWords>(more, from, source);
      Second::template fetch<kWords>(more_old, to, slot);
    }
  }
  __device__ __forceinline__ void copy(int source, char* to, int slot) const {
    First::template copy<kWords>(words, source, old, to, slot);
    if constexpr (kBits == 3) Second::template copy<kWords>(more, source, more_old, to, slot);
  }
};
