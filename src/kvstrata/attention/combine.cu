// The partial results of decode.cu to outputs: a block makes one column (a query and a query head).
//
// Weighted by what each partial result's sum is of the whole; those of quantised tiers are added up in the rotated
// space and rotated back once.
#include "mma.cuh"
#include "pdl.cuh"
#include "work.cuh"

using i64 = long long;

struct Params {
  const float* partial_out;    // [slots, column blocks, columns of a block, D]
  const float2* partial_sum;   // the same without D: reference m and sum l, both in powers of two
  const Slots* slots;          // [2 * rows * kv heads]
  unsigned short* out;         // [rows, queries, heads, D]
  float* lse;                  // [rows, queries, heads], or null
  const float* sinks;          // [heads], or null
  int queries, group, kv_heads, blocks, block_columns;
};

#define kInfinity __int_as_float(0x7f800000)
constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

template <class In, int kDim, int kSplit>
__global__ void __launch_bounds__((kDim + 31) / 32 * 32 * kSplit) combine(const __grid_constant__ Params p) {
  constexpr int kRow = (kDim + 31) / 32 * 32, kThreads = kRow * kSplit, kWarps = kThreads / 32;
  __shared__ float top[kWarps], sums[kSplit], out[2][kSplit][kRow];
  const int columns = p.queries * p.group, unit = blockIdx.x / columns, column = blockIdx.x % columns;
  const int d = threadIdx.x % kRow, split = threadIdx.x / kRow, lane = threadIdx.x & 31;
  const i64 stride = static_cast<i64>(p.blocks) * p.block_columns;
  const int within = column / p.block_columns * p.block_columns + column % p.block_columns;
  const int head = unit % p.kv_heads * p.group + column % p.group;
  wait_for_previous();
  release_next();
  const Slots groups[2] = {p.slots[2 * unit], p.slots[2 * unit + 1]};

  float m = -kInfinity;
#pragma unroll
  for (int kind = 0; kind < 2; kind++)
    for (int i = threadIdx.x; i < groups[kind].count; i += kThreads) {
      const float2 s = p.partial_sum[(groups[kind].first + i) * stride + within];
      if (s.y != 0.f) m = fmaxf(m, s.x);  // 0: nothing was seen
    }
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, lanes));
  if (lane == 0) top[threadIdx.x >> 5] = m;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; w++) m = fmaxf(m, top[w]);
  const float sink = p.sinks ? p.sinks[head] * kLog2e : -kInfinity;
  m = fmaxf(m, sink);

  float sum = 0.f, found[2] = {0.f, 0.f};
#pragma unroll
  for (int kind = 0; kind < 2; kind++)
#pragma unroll 4
    for (int i = split; i < groups[kind].count; i += kSplit) {
      const i64 row = (groups[kind].first + i) * stride + within;
      const float2 s = p.partial_sum[row];
      const float value = d < kDim ? p.partial_out[row * kDim + d] : 0.f, weight = exp2f(s.x - m);
      if (s.y != 0.f) {
        sum += weight * s.y;
        found[kind] += weight * value;
      }
    }
  out[0][split][d] = found[0];
  out[1][split][d] = found[1];
  if (d == 0) sums[split] = sum;
  __syncthreads();
  sum = p.sinks ? exp2f(sink - m) : 0.f;
#pragma unroll
  for (int i = 0; i < kSplit; i++) sum += sums[i];
  if (kSplit > 1) {
    if (split == 0) {
      found[0] = found[1] = 0.f;
#pragma unroll
      for (int i = 0; i < kSplit; i++) {
        found[0] += out[0][i][d];
        found[1] += out[1][i][d];
      }
    }
    __syncthreads();
    if (split == 0) out[1][0][d] = found[1];
    __syncthreads();
  }
  // Butterflies at distance 1, 2, 4 .. of the block, each value in its own thread.
  constexpr int kBlock = kDim & -kDim;
  float x = found[1];
#pragma unroll
  for (int distance = 1; distance < kBlock; distance *= 2) {
    float other;
    if (distance < 32) {
      other = __shfl_xor_sync(~0u, x, distance);
    } else {
      __syncthreads();
      if (split == 0) out[1][0][d] = x;
      __syncthreads();
      other = split == 0 ? out[1][0][d ^ distance] : 0.f;
    }
    x = d & distance ? other - x : x + other;
  }
  if (split || d >= kDim) return;
  const i64 to = (static_cast<i64>(unit / p.kv_heads) * p.queries + column / p.group) * (p.kv_heads * p.group) + head;
  const float value = sum != 0.f ? (found[0] + x * rsqrtf(static_cast<float>(kBlock))) / sum : 0.f;
  p.out[to * kDim + d] = static_cast<unsigned short>(pair_of(In{}, value, 0.f));
  if (p.lse && d == 0) p.lse[to] = sum != 0.f ? (m + log2f(sum)) * kLn2 : -kInfinity;
}
