// Rows of 16-byte chunks in shared memory, placed so that eight rows of one chunk, and eight chunks of one row, are
// in different banks; and a compile-time count that proves it.
//
// Shared memory has 32 banks of 4 bytes and serves 128 bytes at once. Eight rows of kChunks chunks start at 8 / g
// different offsets in these 128 bytes, g = gcd(kChunks, 8): rows that would collide use g different chunks.
#pragma once

template <int kChunks_>
struct Swizzle {
  static constexpr int kChunks = kChunks_, kBytes = kChunks * 16;
  static constexpr int kTogether = kChunks % 8 == 0 ? 8 : kChunks % 4 == 0 ? 4 : kChunks % 2 == 0 ? 2 : 1;
  // Byte offset of a row's chunk.
  static __device__ __forceinline__ constexpr unsigned offset(unsigned row, unsigned chunk) {
    return row * kBytes + (chunk ^ (row / (8 / kTogether) % kTogether)) * 16;
  }
  // From the address of chunk 0 or 1 of a row to that of the chunk 2 * step further. If kBytes is a power of two, tiles are
  // at multiples of it: this is then one instruction, and keeps nothing in registers.
  static __device__ __forceinline__ unsigned further(unsigned address, unsigned row, unsigned chunk, unsigned step) {
    if constexpr (kTogether == 8 && (kChunks & (kChunks - 1)) == 0) return address ^ step * 32;
    else return address + offset(row, chunk + 2 * step) - offset(row, chunk);
  }
};

// Accesses of a warp's lanes. ldmatrix reads a row of 16 bytes per lane, eight lanes per matrix.
struct RowsFirst {  // four 8x8 matrices: both halves of the rows, then the next chunk (Q as A; V, transposed, as B)
  static __device__ __forceinline__ constexpr unsigned row(unsigned lane) { return lane & 15; }
  static __device__ __forceinline__ constexpr unsigned chunk(unsigned lane) { return lane >> 4; }
};
struct ChunksFirst {  // both chunks, then the other half of the rows (K as B)
  static __device__ __forceinline__ constexpr unsigned row(unsigned lane) { return (lane & 7) + (lane >> 4) * 8; }
  static __device__ __forceinline__ constexpr unsigned chunk(unsigned lane) { return lane >> 3 & 1; }
};
template <class Layout>
struct Copied {  // one chunk per lane, row by row
  static __device__ __forceinline__ constexpr unsigned row(unsigned lane) { return lane / Layout::kChunks; }
  static __device__ __forceinline__ constexpr unsigned chunk(unsigned lane) { return lane % Layout::kChunks; }
};
struct Fragment {  // 4 bytes per lane: the result of mma for 8 rows and one chunk
  static __device__ __forceinline__ constexpr unsigned row(unsigned lane) { return lane >> 2; }
  static __device__ __forceinline__ constexpr unsigned chunk(unsigned) { return 0; }
};

// Maximum number of lanes that access different words of one bank at once, kWidth bytes each; 1 is no conflict.
template <class Layout, class Access, int kWidth>
__device__ constexpr int bank_ways(int first_row, int first_chunk) {
  constexpr int kLanes = 128 / kWidth < 32 ? 128 / kWidth : 32, kWords = kWidth / 4;
  int most = 0;
  for (int first = 0; first < 32; first += kLanes) {
    int words[32] = {}, ways[32] = {};
    for (int i = 0; i < kLanes; i++) {
      const int lane = first + i;
      const int start = Layout::offset(first_row + Access::row(lane), first_chunk + Access::chunk(lane)) / 4;
      for (int w = 0; w < kWords; w++) words[i * kWords + w] = start + w + (kWidth == 4 ? lane % 4 : 0);
    }
    for (int i = 0; i < 32; i++) {
      bool seen = false;
      for (int j = 0; j < i; j++) seen = seen || words[j] == words[i];
      if (!seen) ways[words[i] % 32]++;
    }
    for (int bank = 0; bank < 32; bank++) most = ways[bank] > most ? ways[bank] : most;
  }
  return most;
}

// The worst case over all positions of the layout.
template <class Layout, class Access, int kWidth, int kChunkStep>
__device__ constexpr int worst_bank_ways() {
  int most = 0;
  for (int row = 0; row < 16; row += 8)
    for (int chunk = 0; chunk < (kChunkStep ? Layout::kChunks : 1); chunk += kChunkStep ? kChunkStep : 1) {
      const int ways = bank_ways<Layout, Access, kWidth>(row, chunk);
      most = ways > most ? ways : most;
    }
  return most;
}

// All accesses of an attention tile: operands by ldmatrix, rows copied in, fragments written out.
template <class Layout>
__device__ constexpr int tile_bank_ways() {
  const int all[] = {worst_bank_ways<Layout, RowsFirst, 16, 2>(), worst_bank_ways<Layout, ChunksFirst, 16, 2>(),
                     worst_bank_ways<Layout, Copied<Layout>, 16, 0>(), worst_bank_ways<Layout, Fragment, 4, 1>()};
  int most = 0;
  for (int ways : all) most = ways > most ? ways : most;
  return most;
}
