// Positions of data: pages of a pool by handle, words of a lane and scales of a token in a page. In Python: format.py,
// fragments.py and scales.py.
#pragma once

using i64 = long long;

constexpr int kUnitBytes = 64;  // UNIT of layout/format.py
constexpr int kMaxTiers = 8;    // MAX_TIERS

__device__ __forceinline__ char* page_address(const i64* pointers, int units, int handle) {
  return reinterpret_cast<char*>(pointers[handle / units]) + static_cast<i64>(handle % units) * kUnitBytes;
}

// 32-bit words per lane of one side's codes, for tiles * steps fragments. The low plane of 3-bit codes comes first.
__device__ __forceinline__ constexpr int plane_words(int width, int fragments) { return (fragments * width + 3) / 4; }
__device__ __forceinline__ constexpr int words_per_lane(int bits, int fragments) {
  return bits == 3 ? plane_words(2, fragments) + plane_words(1, fragments) : plane_words(bits, fragments);
}

// Bytes of one side's codes in a page.
__device__ __forceinline__ constexpr int code_bytes(int bits, int fragments) { return 128 * words_per_lane(bits, fragments); }

// The byte where word w of a lane begins, of kWords per lane: 16-byte chunks, lane after lane, then an 8- and a 4-byte one.
template <int kWords>
__device__ __forceinline__ int word_address(int w, int lane) {
  constexpr int kChunked = kWords / 4 * 4, kRest = kWords % 4;
  if (w < kChunked) return w / 4 * 512 + lane * 16 + w % 4 * 4;
  if (kRest >= 2 && w - kChunked < 2) return kChunked * 128 + lane * 8 + (w - kChunked) * 4;
  return kChunked * 128 + (kRest == 3 ? 256 : 0) + lane * 4;
}

// Scales of a page, fp16: (k[g], k[g + 8], v[g], v[g + 8]) for each of 8 rows g of a tile. Bytes of a tile, the byte of a
// row, and the index of one scale.
constexpr int kTileScaleBytes = 64;
__device__ __forceinline__ int scale_row(int tile, int g) { return tile * kTileScaleBytes + g * 8; }
__device__ __forceinline__ int scale_index(int slot, bool is_v) {
  return (slot & ~15) * 2 + (slot & 7) * 4 + (slot >> 3 & 1) + 2 * is_v;
}
