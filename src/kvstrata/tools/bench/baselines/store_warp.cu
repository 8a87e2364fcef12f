// The store that the note on K/V stores starts from, as a baseline: one warp per token copies the K row, then
// the V row. Contiguous 16-bit rows of kRowBytes on both sides, no padding slots, no bounds check.
template <int kRowBytes>
__global__ void store_warp(char* k_cache, char* v_cache, const int* slot_mapping, const char* k, const char* v, int tokens) {
  static_assert(kRowBytes % 128 == 0, "a warp moves at least 4 bytes a lane");
  constexpr int kWidth = kRowBytes % 512 == 0 ? 16 : kRowBytes % 256 == 0 ? 8 : 4;
  struct alignas(kWidth) Chunk { char bytes[kWidth]; };
  const int token = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (token >= tokens) return;
  const long long from = static_cast<long long>(token) * kRowBytes, to = static_cast<long long>(slot_mapping[token]) * kRowBytes;
#pragma unroll
  for (int i = lane * kWidth; i < kRowBytes; i += 32 * kWidth)
    *reinterpret_cast<Chunk*>(k_cache + to + i) = *reinterpret_cast<const Chunk*>(k + from + i);
#pragma unroll
  for (int i = lane * kWidth; i < kRowBytes; i += 32 * kWidth)
    *reinterpret_cast<Chunk*>(v_cache + to + i) = *reinterpret_cast<const Chunk*>(v + from + i);
}
