// What the list of a whole page says of a slot: a row's address, codes of another tier, or nothing (negative).
#pragma once

using i64 = long long;
using u64 = unsigned long long;

// A token that comes as codes of another tier: slot, page and tier in one number (moves.cu makes them, quantize.cu reads them).
constexpr i64 kCoded = 1ll << 62;
template <class Index> __device__ __forceinline__ bool is_plain(Index row) {
  if constexpr (sizeof(Index) == 8) return static_cast<u64>(row) < static_cast<u64>(kCoded);
  else return row >= 0;
}
template <class Index> __device__ __forceinline__ bool is_coded(Index row) {
  if constexpr (sizeof(Index) == 8) return row >= kCoded;
  else return false;
}
