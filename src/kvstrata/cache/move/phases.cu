// The parts of a move that repack.cu and quantize.cu do not handle: copies tokens from slot to slot of a tier, as plain rows or
// as codes, and writes positions and importance of tokens whose codes were written as whole pages.
//
// Each lane looks up one of up to 32 tokens and copies its position and importance; then the warp processes the tokens, with
// the words of several in flight. Fillers come from past the end of the bucket and go before it, so no move writes what
// another reads.
#include "planes.cuh"

struct Params {
  const int4* copies;   // [n] handle and slot, from and to, of one tier
  const int2* sides;    // [n] position and importance of the slots of new pages; -1: an empty slot
  const int* pages;     // [pages, 2] handle and tier
  const i64* pointers;  // [slabs]
  i64 n;
  int units, page_tokens, tier, v_offset, scale_offset;  // tier and offsets of the copies
  int per_warp;                                          // copies, at most 32
  int offsets[kMaxTiers][2];  // by tier: offsets of positions and importance
};

// The moves of a warp: each lane its own, the pages' addresses and the slots in them.
struct Batch {
  int tokens;
  i64 from, to;
  int source, slot;

  template <class Position, bool kKeeps>
  __device__ __forceinline__ void begin(const Params& p) {
    const i64 first = (static_cast<i64>(blockIdx.x) * 8 + (threadIdx.x >> 5)) * p.per_warp;
    const int lane = threadIdx.x & 31;
    tokens = static_cast<int>(max(static_cast<i64>(0), min(static_cast<i64>(p.per_warp), p.n - first)));
    from = to = source = slot = 0;
    if (lane >= tokens) return;
    const int4 move = p.copies[first + lane];
    const char* old = page_address(p.pointers, p.units, move.x);
    char* page = page_address(p.pointers, p.units, move.z);
    const int positions = p.offsets[p.tier][0], importance = p.offsets[p.tier][1];
    reinterpret_cast<Position*>(page + positions)[move.w] = reinterpret_cast<const Position*>(old + positions)[move.y];
    if constexpr (kKeeps)
      reinterpret_cast<int*>(page + importance)[move.w] = reinterpret_cast<const int*>(old + importance)[move.y];
    from = reinterpret_cast<i64>(old);
    to = reinterpret_cast<i64>(page);
    source = move.y;
    slot = move.w;
  }
};

template <int kRow, class Position, bool kKeeps>
__global__ void __launch_bounds__(256, 3) copy_rows(const __grid_constant__ Params p) {
  constexpr int kUnits = 2 * kRow / 16, kLoads = 8;  // 16 bytes each, of K and V
  const int lane = threadIdx.x & 31;
  Batch batch;
  batch.begin<Position, kKeeps>(p);
  const int units = batch.tokens * kUnits;
  const i64 from = batch.from + batch.source * kRow, to = batch.to + batch.slot * kRow;
  for (int start = lane; start - lane < units; start += 32 * kLoads) {
    uint4 x[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int unit = start + 32 * i, part = unit % kUnits;
      const i64 row = __shfl_sync(~0u, from, unit / kUnits & 31) + (part < kUnits / 2 ? 0 : p.v_offset);
      if (unit < units) x[i] = *reinterpret_cast<const uint4*>(row + part % (kUnits / 2) * 16);
    }
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int unit = start + 32 * i, part = unit % kUnits;
      const i64 row = __shfl_sync(~0u, to, unit / kUnits & 31) + (part < kUnits / 2 ? 0 : p.v_offset);
      if (unit < units) *reinterpret_cast<uint4*>(row + part % (kUnits / 2) * 16) = x[i];
    }
  }
}

template <int kDim, int kTokens, int kKBits, int kVBits, class Position, bool kKeeps>
__global__ void __launch_bounds__(256, kDim <= 128 ? 3 : 2) copy_codes(const __grid_constant__ Params p) {
  constexpr int kTogether = kDim <= 128 ? 2 : 1;
  Batch batch;
  batch.begin<Position, kKeeps>(p);
  if ((threadIdx.x & 31) < batch.tokens) {
    const auto* old = reinterpret_cast<const unsigned short*>(batch.from + p.scale_offset);
    auto* scales = reinterpret_cast<unsigned short*>(batch.to + p.scale_offset);
#pragma unroll
    for (int side = 0; side < 2; side++) scales[scale_index(batch.slot, side)] = old[scale_index(batch.source, side)];
  }
  for (int i = 0; i < batch.tokens; i += kTogether) {
    TokenCodes<kDim, kTokens, kKBits, false> k[kTogether];
    TokenCodes<kDim, kTokens, kVBits, true> v[kTogether];
    i64 to[kTogether];
    int source[kTogether], slot[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      const int which = min(i + j, batch.tokens - 1);
      const char* from = reinterpret_cast<const char*>(__shfl_sync(~0u, batch.from, which));
      to[j] = __shfl_sync(~0u, batch.to, which);
      source[j] = __shfl_sync(~0u, batch.source, which);
      slot[j] = __shfl_sync(~0u, batch.slot, which);
      char* page = reinterpret_cast<char*>(to[j]);
      k[j].fetch(from, source[j], page, slot[j]);
      v[j].fetch(from + p.v_offset, source[j], page + p.v_offset, slot[j]);
    }
#pragma unroll
    for (int j = 0; j < kTogether; j++) {
      if (i + j >= batch.tokens) break;
      char* page = reinterpret_cast<char*>(to[j]);
      k[j].copy(source[j], page, slot[j]);
      v[j].copy(source[j], page + p.v_offset, slot[j]);
    }
  }
}

template <class Position, bool kKeeps>
__global__ void __launch_bounds__(256) write_sides(const __grid_constant__ Params p) {
  const i64 i = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= p.n) return;
  const int2 side = p.sides[i];
  if (side.x < 0) return;
  const int slot = static_cast<int>(i % p.page_tokens);
  const int2 owner = reinterpret_cast<const int2*>(p.pages)[i / p.page_tokens];
  char* page = page_address(p.pointers, p.units, owner.x);
  reinterpret_cast<Position*>(page + p.offsets[owner.y][0])[slot] = static_cast<Position>(side.x);
  if constexpr (kKeeps) reinterpret_cast<int*>(page + p.offsets[owner.y][1])[slot] = side.y;
}
