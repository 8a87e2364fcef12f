// Writes new K and V rows into the plain pages of their (request, KV head): a warp copies one token of one head.
//
//   row i = (request, its j-th new token) --> slot = plain tokens before + j --> table[request, head, slot / P]
//
// The counts before come from the host, so no warp waits for another; the warp of a request's last row sets the new count
// and, for head 0, the length. Decode steps have a separate kernel (append_one), and captured steps, in which the host has
// already updated counts and lengths, another one (write_last). In is the dtype of rows whose K has a balance, else void.
#include "mma.cuh"
#include "page.cuh"
#include "vec.cuh"

struct Params {
  const char* k;
  const char* v;
  const i64* pointers;      // [slabs]
  const int* table;         // [requests, layers, heads, tiers, max_pages]
  int* count;               // [requests, layers, heads, tiers]
  int* length;              // [requests, layers]
  const int* meta;          // [R, 8] request, position, first row, tokens, importance; [R, heads] counts; [T] index
  const float* importance;  // [T, heads] or null
  const signed char* balance;  // [requests, layers, heads, D]: K of In is divided by 2 to this power; null for void
  i64 k_token, k_head, v_token, v_head;  // strides in bytes
  int tokens, heads, given, layer, layers, tiers, max_pages, page_tokens, units;
  int v_offset, position_offset, importance_offset;
  int reciprocal;  // not used by append_rows: 1 if importance begins as 1 / length, else as 0
};

__device__ __forceinline__ i64 head_cache_of(const Params& p, int request, int head) {
  return (static_cast<i64>(request) * p.layers + p.layer) * p.heads + head;
}

__device__ __forceinline__ float divided(float x, int power) { return x * __int_as_float((127 - power) << 23); }

// A run of K divided by powers of two, which is exact.
template <class In, int kBytes>
__device__ __forceinline__ void divide_run(Vec<kBytes>& run, const signed char* powers) {
  if constexpr (sizeof(In) == 4) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; i++) run.words[i] = __float_as_uint(divided(__uint_as_float(run.words[i]), powers[i]));
  } else if constexpr (kBytes == 2) {
    run.words[0] = static_cast<unsigned short>(pair_of(In{}, divided(element<In>(run, 0), powers[0]), 0.f));
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 4; i++)
      run.words[i] = pair_of(In{}, divided(element<In>(run, 2 * i), powers[2 * i]),
                             divided(element<In>(run, 2 * i + 1), powers[2 * i + 1]));
  }
}

template <class In> constexpr bool kBalanced = true;
template <> constexpr bool kBalanced<void> = false;

// A warp writes one token of one head to its slot.
template <int kRow, int kWidth, class Position, bool kKeeps, class In>
__device__ __forceinline__ void copy_token(const Params& p, int token, int head, i64 head_cache, int slot, int position,
                                           float importance) {
  const i64 bucket = head_cache * p.tiers;
  const int lane = threadIdx.x & 31, row = slot % p.page_tokens;
  char* page = page_address(p.pointers, p.units, p.table[bucket * p.max_pages + slot / p.page_tokens]);
  constexpr int kUnits = kRow / kWidth;
  const char* k = p.k + token * p.k_token + head * p.k_head;
  const char* v = p.v + token * p.v_token + head * p.v_head;
#pragma unroll(4)
  for (int i = 0; i < 2 * kUnits; i += 32) {
    const int unit = i + lane;
    if (2 * kUnits % 32 == 0 || unit < 2 * kUnits) {
      const bool is_v = unit >= kUnits;
      const int byte = (is_v ? unit - kUnits : unit) * kWidth;
      Vec<kWidth> run = load_once<kWidth>((is_v ? v : k) + byte);
      if constexpr (kBalanced<In>)
        if (!is_v) divide_run<In>(run, p.balance + head_cache * (kRow / sizeof(In)) + byte / sizeof(In));
      store(page + (is_v ? p.v_offset : 0) + row * kRow + byte, run);
    }
  }
  if (lane == 0) {
    reinterpret_cast<Position*>(page + p.position_offset)[row] = static_cast<Position>(position);
    if constexpr (kKeeps) reinterpret_cast<float*>(page + p.importance_offset)[row] = importance;
  }
}

template <int kRow, int kWidth, class Position, bool kKeeps, class In = void>
__global__ void __launch_bounds__(256) append_rows(const __grid_constant__ Params p) {
  const int warp = blockIdx.x * 8 + (threadIdx.x >> 5);
  if (warp >= p.tokens * p.heads) return;
  const int token = warp / p.heads, head = warp % p.heads;
  const int index = p.meta[p.given * (8 + p.heads) + token];
  const int4 about = *reinterpret_cast<const int4*>(p.meta + index * 8);
  const int number = token - about.z, slot = p.meta[p.given * 8 + index * p.heads + head] + number;
  const float first = p.importance ? p.importance[static_cast<i64>(token) * p.heads + head]
                                   : __int_as_float(p.meta[index * 8 + 4]);
  const i64 head_cache = head_cache_of(p, about.x, head);
  copy_token<kRow, kWidth, Position, kKeeps, In>(p, token, head, head_cache, slot, about.y + number, first);
  if ((threadIdx.x & 31) == 0 && number == about.w - 1) {
    p.count[head_cache * p.tiers] = slot + 1;
    if (head == 0) p.length[about.x * p.layers + p.layer] = about.y + about.w;
  }
}

// One token per request, one block for its heads: counts and lengths are read on the device, so the host only passes the
// requests (meta).
template <int kRow, int kWidth, class Position, bool kKeeps, class In = void>
__global__ void __launch_bounds__(256) append_one(const __grid_constant__ Params p) {
  const int request = p.meta[blockIdx.x], warps = blockDim.x >> 5;
  int* length = p.length + request * p.layers + p.layer;
  const int position = *length;
  const float first = p.reciprocal ? __fdiv_rn(1.f, static_cast<float>(position + 1)) : 0.f;
  for (int head = threadIdx.x >> 5; head < p.heads; head += warps) {
    const i64 head_cache = head_cache_of(p, request, head);
    int* count = p.count + head_cache * p.tiers;
    const int slot = *count;
    copy_token<kRow, kWidth, Position, kKeeps, In>(p, blockIdx.x, head, head_cache, slot, position, first);
    __syncwarp();  // all lanes have read the count
    if ((threadIdx.x & 31) == 0) *count = slot + 1;
  }
  __syncthreads();  // all warps have read the length
  if (threadIdx.x == 0) *length = position + 1;
}

// The last token of each request: counts and lengths already include it. meta holds the requests, read when the kernel runs
// (null: 0, 1, ..); numbers that are not below `given`, and requests without a token, have no row.
template <int kRow, int kWidth, class Position, bool kKeeps, class In = void>
__global__ void __launch_bounds__(256) write_last(const __grid_constant__ Params p) {
  const int request = p.meta ? p.meta[blockIdx.x] : static_cast<int>(blockIdx.x), warps = blockDim.x >> 5;
  if (request < 0 || request >= p.given) return;
  const int length = p.length[request * p.layers + p.layer];
  const float first = p.reciprocal ? __fdiv_rn(1.f, static_cast<float>(length)) : 0.f;
  for (int head = threadIdx.x >> 5; head < p.heads; head += warps) {
    const i64 head_cache = head_cache_of(p, request, head);
    const int slot = p.count[head_cache * p.tiers] - 1;
    if (slot >= 0) copy_token<kRow, kWidth, Position, kKeeps, In>(p, blockIdx.x, head, head_cache, slot, length - 1, first);
  }
}
