// A slot in the list of a whole page: a row's address, codes of another tier (coded_row), or empty (negative).
#pragma once

#include "page.cuh"

using u64 = unsigned long long;

// A token given as codes of another tier: tier, address of the page and slot in one number. Pages begin at multiples
// of kUnitBytes, which leaves the low bits for the slot.
constexpr i64 kCoded = 1ll << 62;
constexpr int kTierShift = 56;
__device__ __forceinline__ i64 coded_row(int tier, const char* page, int slot) {
  return kCoded | static_cast<i64>(tier) << kTierShift | reinterpret_cast<i64>(page) | slot;
}
__device__ __forceinline__ int coded_tier(i64 row) { return static_cast<int>(row >> kTierShift & 63); }
__device__ __forceinline__ const char* coded_page(i64 row) {
  return reinterpret_cast<const char*>(row & ((1ll << kTierShift) - kUnitBytes));
}
__device__ __forceinline__ int coded_slot(i64 row) { return static_cast<int>(row & (kUnitBytes - 1)); }
template <class Index> __device__ __forceinline__ bool is_plain(Index row) {
  if constexpr (sizeof(Index) == 8) return static_cast<u64>(row) < static_cast<u64>(kCoded);
  else return row >= 0;
}
template <class Index> __device__ __forceinline__ bool is_coded(Index row) {
  if constexpr (sizeof(Index) == 8) return row >= kCoded;
  else return false;
}
