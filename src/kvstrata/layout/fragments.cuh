// Codes of a page in the order of layout/fragments.py, as the lanes of a warp hold them.
//
// A tile is 16 tokens, a step 16 dims. In every tile and step a lane owns eight values, indexed by register r and
// half; layout/fragments.py says which values of K and V they are. The words of a lane are 16-byte chunks, lane by lane.
#pragma once
#include "page.cuh"
#include "vec.cuh"

// A warp's tile: value [step][r][half] of the lane, r and half as in layout/fragments.py.
template <int kSteps> using Tile = float[kSteps][4][2];

// A lane's codes of one tile, packed into words step by step, and written to their place in the page.
template <int kBits, int kSteps>
struct Codes {
  static constexpr int kLowBits = kBits == 3 ? 2 : kBits;
  static constexpr int kLow = kSteps * kLowBits, kHigh = kBits == 3 ? kSteps : 0;  // quarters of a word in a tile
  static constexpr bool kWhole = kLow % 4 == 0 && kHigh % 4 == 0;                  // no word is shared by two tiles
  unsigned low[kSteps][2];  // 8 bit: two words per step; 4: one; 2 and 3: 16 bits of fields in [s][0], or whole words
  unsigned high[kSteps];    // 3 bit: fields of a step, or whole words
  unsigned before[2][2];    // 3 bit, whole words: the last two steps

  // The codes of a step as bytes, `even` of registers 0 and 2, `odd` of 1 and 3: byte 2 half + r / 2.
  __device__ __forceinline__ void set(int s, unsigned even, unsigned odd) {
    if constexpr (kBits == 8) {
      low[s][0] = __byte_perm(even, odd, 0x6420);
      low[s][1] = __byte_perm(even, odd, 0x7531);
    } else if constexpr (kBits == 4) {
      low[s][0] = odd * 16 + even;
    } else if constexpr (kBits == 2) {
      const unsigned fields = odd * 4 + even;
      low[s][0] = (fields >> 4 | fields) & 0x00ff00ffu;
    } else if constexpr (kWhole) {
      set_word(s, even, odd);
    } else {
      constexpr unsigned kTwo = 0x03030303u, kTop = 0x04040404u;
      const unsigned fields = (odd & kTwo) * 4 + (even & kTwo), tops = (odd & kTop) * 4 + (even & kTop);
      low[s][0] = (fields >> 4 | fields) & 0x00ff00ffu;
      high[s] = (tops & 0x00ff00ffu) + (tops >> 8 & 0x00ff00ffu) * 16;
    }
  }

  // 3 bit, four steps at a time: steps two apart next to each other, as in the plane of high bits.
  __device__ __forceinline__ void set_word(int s, unsigned r02, unsigned r13) {
    const int odd = s % 2, w = s / 4;
    if (s % 4 < 2) {
      before[odd][0] = r02;
      before[odd][1] = r13;
      return;
    }
    unsigned x[4], top[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      x[r] = __byte_perm(before[odd][r % 2], r % 2 ? r13 : r02, r < 2 ? 0x6240 : 0x7351);
      top[r] = x[r] & 0x04040404u;
    }
    const unsigned first = top[1] * 4 + top[0], second = top[3] * 4 + top[2];
    const unsigned tops = first | __funnelshift_l(second, second, 4);
    const unsigned all = ((x[3] * 4 + x[2]) * 4 + x[1]) * 4 + x[0];  // fields of three bits, two apart, combined
    const unsigned fields = all - (second * 16 + first);
    if (!odd) {
      low[2 * w][0] = fields;
      high[w] = tops;
    } else {
      const unsigned even = low[2 * w][0];
      low[2 * w][0] = __byte_perm(even, fields, 0x6240);
      low[2 * w + 1][0] = __byte_perm(even, fields, 0x7351);
      high[w] |= __funnelshift_l(tops, tops, 1);
    }
  }

  // Position of words i .. i + kAligned - 1 of those from w on; w and i are multiples of kAligned.
  template <int kWords, int kAligned>
  static __device__ __forceinline__ unsigned char* place_of(unsigned char* to, int w, int i) {
    const int lane = threadIdx.x & 31;
    return to + (kAligned == 4 ? word_address<kWords>(w, lane) + i * 128 : word_address<kWords>(w + i, lane));
  }

  // Minimum number of contiguous words in planes of kCount words, `first` words into the page. Past the last whole chunk
  // of the page words are in narrower chunks: 1 there.
  static __device__ __forceinline__ constexpr int aligned(int words, int count, int first = 0) {
    return words % 4 || first % 4 ? 1 : count % 4 == 0 ? 4 : count % 2 == 0 ? 2 : 1;
  }

  template <int kWords, int kCount, int kAligned>
  static __device__ __forceinline__ void write(unsigned char* to, int w, const unsigned* words) {
#pragma unroll
    for (int i = 0; i < kCount; i += kAligned) {
      Vec<kAligned * 4> out;
#pragma unroll
      for (int e = 0; e < kAligned; e++) out.words[e] = words[i + e];
      store(place_of<kWords, kAligned>(to, w, i), out);
    }
  }

  // Replaces only the bits of `fields`: a word may have fields of tokens that another warp writes at the same time.
  template <class T>
  static __device__ __forceinline__ void replace(unsigned char* word, T fields, T bits) {
    atomicAnd(reinterpret_cast<T*>(word), ~fields);
    atomicOr(reinterpret_cast<T*>(word), bits & fields);
  }

  // Same for kCount words from w on, two at a time if they are contiguous.
  template <int kWords, int kCount, int kAligned>
  static __device__ __forceinline__ void replace_all(unsigned char* to, int w, const unsigned* fields, const unsigned* bits) {
    constexpr int kPer = kAligned > 1 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kCount; i += kPer) {
      unsigned char* word = place_of<kWords, kAligned>(to, w, i / kAligned * kAligned) + i % kAligned * 4;
      if constexpr (kPer == 2) replace(word, both(fields + i), both(bits + i));
      else replace(word, fields[i], bits[i]);
    }
  }
  static __device__ __forceinline__ unsigned long long both(const unsigned* words) {
    return words[0] | static_cast<unsigned long long>(words[1]) << 32;
  }

  // Word w of the tile's low plane, if no word is shared by two tiles.
  __device__ __forceinline__ unsigned low_word(int w) const {
    if constexpr (kBits == 8) return low[w / 2][w % 2];
    else if constexpr (kBits > 2) return low[w][0];
    else return low[2 * w][0] | low[2 * w + 1][0] << 8;
  }

  template <int kTiles>
  __device__ __forceinline__ void flush(unsigned char* to, int tile) const {
    constexpr int kLowWords = plane_words(kLowBits, kTiles * kSteps), kWords = words_per_lane(kBits, kTiles * kSteps);
    if constexpr (kWhole) {
      constexpr int kCount = kLow / 4;
      unsigned words[kCount];
#pragma unroll
      for (int w = 0; w < kCount; w++) words[w] = low_word(w);
      write<kWords, kCount, aligned(kWords, kCount)>(to, tile * kCount, words);
      if constexpr (kBits == 3) {
        constexpr int kTop = kHigh / 4;
        write<kWords, kTop, aligned(kWords, kTop, kLowWords)>(to, kLowWords + tile * kTop, high);
      }
    } else {  // `to` is shared memory, zeroed; two tiles may have bits in one word
#pragma unroll
      for (int s = 0; s < kSteps; s++)
        each_field<kTiles>(tile, s, *this, [&](int w, unsigned bits, unsigned) {
          atomicOr(reinterpret_cast<unsigned*>(to + word_address<kWords>(w, threadIdx.x & 31)), bits);
        });
    }
  }

  // f(word, bits, fields) for the words that hold fields of step s: the lane's bits in it, and those of `mask`.
  template <int kTiles, class F>
  __device__ __forceinline__ void each_field(int tile, int s, const Codes& mask, F f) const {
    constexpr int kLowWords = plane_words(kLowBits, kTiles * kSteps);
    const int j = tile * kSteps + s;
    if constexpr (kBits == 8) {
      f(2 * j, low[s][0], mask.low[s][0]);
      f(2 * j + 1, low[s][1], mask.low[s][1]);
    } else if constexpr (kBits == 4) {
      f(j, low[s][0], mask.low[s][0]);
    } else {
      f(j / 2, low[s][0] << j % 2 * 8, mask.low[s][0] << j % 2 * 8);
      if constexpr (kBits == 3) {
        const int q = j % 4, turn = q % 2 + q / 2 * 8;
        f(kLowWords + j / 4, __funnelshift_l(high[s], high[s], turn), __funnelshift_l(mask.high[s], mask.high[s], turn));
      }
    }
  }

  // Replaces the fields all of whose bits are in `mask`.
  template <int kTiles>
  __device__ __forceinline__ void merge(unsigned char* to, int tile, const Codes& mask) const {
    constexpr int kLowWords = plane_words(kLowBits, kTiles * kSteps), kWords = words_per_lane(kBits, kTiles * kSteps);
    if constexpr (kWhole) {
      constexpr int kCount = kLow / 4, kTop = kHigh / 4;
      unsigned words[kCount], fields[kCount], any = 0;
#pragma unroll
      for (int w = 0; w < kCount; w++) words[w] = low_word(w), any |= fields[w] = mask.low_word(w);
      if (!any) return;
      replace_all<kWords, kCount, aligned(kWords, kCount)>(to, tile * kCount, fields, words);
      if constexpr (kBits == 3)
        replace_all<kWords, kTop, aligned(kWords, kTop, kLowWords)>(to, kLowWords + tile * kTop, mask.high, high);
    } else {
#pragma unroll
      for (int s = 0; s < kSteps; s++)
        each_field<kTiles>(tile, s, mask, [&](int w, unsigned bits, unsigned fields) {
          if (fields) replace(to + word_address<kWords>(w, threadIdx.x & 31), fields, bits);
        });
    }
  }
};
