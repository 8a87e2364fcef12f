// New K and V rows into the plain pages of their (request, KV head): a warp copies one token of one head.
//
//   row i = (request, its j-th new token) --> slot = plain tokens before + j --> table[request, head, slot / P]
//
// Counts before come from the host, so no warp waits for another; the warp of a request's last row sets the count
// after, and for head 0 the length.
#include "vec.cuh"

using i64 = long long;

struct Params {
  const char* k;
  const char* v;
  const i64* pointers;      // [slabs]
  const int* table;         // [requests, layers, heads, tiers, max_pages]
  int* count;               // [requests, layers, heads, tiers]
  int* length;              // [requests, layers]
  const int* meta;          // [R, 8] request, position, first row, tokens, importance; [R, heads] counts; [T] index
  const float* importance;  // [T, heads] or null
  i64 k_token, k_head, v_token, v_head;  // strides in bytes
  int tokens, heads, given, layer, layers, tiers, max_pages, page_tokens, units;
  int v_offset, position_offset, importance_offset;
};

template <int kRow, int kWidth, class Position, bool kKeeps>
__global__ void __launch_bounds__(256) append_rows(const __grid_constant__ Params p) {
  const int warp = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (warp >= p.tokens * p.heads) return;
  const int token = warp / p.heads, head = warp % p.heads;
  const int index = p.meta[p.given * (8 + p.heads) + token];
  const int4 about = *reinterpret_cast<const int4*>(p.meta + index * 8);
  const int number = token - about.z, before = p.meta[p.given * 8 + index * p.heads + head];
  const int slot = before + number, row = slot % p.page_tokens;
  const i64 bucket = ((static_cast<i64>(about.x) * p.layers + p.layer) * p.heads + head) * p.tiers;
  const int handle = p.table[bucket * p.max_pages + slot / p.page_tokens];
  char* page = reinterpret_cast<char*>(p.pointers[handle / p.units]) + static_cast<i64>(handle % p.units) * 64;

  constexpr int kUnits = kRow / kWidth;
  const char* k = p.k + token * p.k_token + head * p.k_head;
  const char* v = p.v + token * p.v_token + head * p.v_head;
#pragma unroll
  for (int i = 0; i < 2 * kUnits; i += 32) {
    const int unit = i + lane;
    if (2 * kUnits % 32 == 0 || unit < 2 * kUnits) {
      const bool is_v = unit >= kUnits;
      const int at = (is_v ? unit - kUnits : unit) * kWidth;
      store(page + (is_v ? p.v_offset : 0) + row * kRow + at, load_once<kWidth>((is_v ? v : k) + at));
    }
  }
  if (lane == 0) {
    reinterpret_cast<Position*>(page + p.position_offset)[row] = static_cast<Position>(about.y + number);
    if constexpr (kKeeps) {
      const float first = __int_as_float(p.meta[index * 8 + 4]);
      reinterpret_cast<float*>(page + p.importance_offset)[row] =
          p.importance ? p.importance[static_cast<i64>(token) * p.heads + head] : first;
    }
    if (number == about.w - 1) {
      p.count[bucket] = slot + 1;
      if (head == 0) p.length[about.x * p.layers + p.layer] = about.y + about.w;
    }
  }
}
