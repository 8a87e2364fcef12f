// The partial results of decode.cu to outputs: a block makes one column (a query and a query head).
//
// Its warps share out the partial results, each with a streaming softmax of its own; then they are put together. What
// comes from quantised tiers is added up in the rotated space and rotated back once.
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

template <class In, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps * 32) combine(const __grid_constant__ Params p) {
  constexpr int kPer = (kDim + 31) / 32, kAhead = 4;
  static_assert(kWarps >= kPer, "a thread for every dim");
  __shared__ float tops[kWarps], sums[kWarps], outs[2][kWarps][kPer * 32];
  const int columns = p.queries * p.group, unit = blockIdx.x / columns, column = blockIdx.x % columns;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const i64 stride = static_cast<i64>(p.blocks) * p.block_columns;
  const int head = unit % p.kv_heads * p.group + column % p.group;
  wait_for_previous();
  release_next();

  float m = -kInfinity, sum = 0.f, found[2][kPer] = {};
#pragma unroll
  for (int kind = 0; kind < 2; kind++) {
    const Slots group = p.slots[2 * unit + kind];
    for (int first = warp; first < group.count; first += kWarps * kAhead) {
      float2 part[kAhead];
      float value[kAhead][kPer];
#pragma unroll
      for (int a = 0; a < kAhead; a++) {
        const int i = first + a * kWarps;
        const i64 row = (group.first + i) * stride + column;
        part[a] = i < group.count ? p.partial_sum[row] : make_float2(0.f, 0.f);
#pragma unroll
        for (int j = 0; j < kPer; j++) {
          const int d = lane + 32 * j;
          value[a][j] = i < group.count && d < kDim ? p.partial_out[row * kDim + d] : 0.f;
        }
      }
#pragma unroll
      for (int a = 0; a < kAhead; a++)
        if (part[a].y != 0.f) {  // 0: nothing was seen
          const float top = fmaxf(m, part[a].x), before = exp2f(m - top), now = exp2f(part[a].x - top);
          m = top;
          sum = sum * before + now * part[a].y;
#pragma unroll
          for (int j = 0; j < kPer; j++) {
            found[0][j] *= before;
            found[1][j] *= before;
            found[kind][j] += now * value[a][j];
          }
        }
    }
  }
#pragma unroll
  for (int j = 0; j < kPer; j++) {
    outs[0][warp][lane + 32 * j] = found[0][j];
    outs[1][warp][lane + 32 * j] = found[1][j];
  }
  if (lane == 0) tops[warp] = m, sums[warp] = sum;
  __syncthreads();

  const float sink = p.sinks ? p.sinks[head] * kLog2e : -kInfinity;
  m = sink;
#pragma unroll
  for (int w = 0; w < kWarps; w++) m = fmaxf(m, tops[w]);
  const int d = threadIdx.x;
  float plain = 0.f, x = 0.f;
  sum = sink > -kInfinity ? exp2f(sink - m) : 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; w++)
    if (sums[w] != 0.f) {
      const float weight = exp2f(tops[w] - m);
      sum += weight * sums[w];
      if (d < kPer * 32) {
        plain += weight * outs[0][w][d];
        x += weight * outs[1][w][d];
      }
    }
  // Butterflies at distance 1, 2, 4 .. of the block, each value in its own thread.
  constexpr int kBlock = kDim & -kDim;
#pragma unroll
  for (int distance = 1; distance < kBlock; distance *= 2) {
    float other;
    if (distance < 32) {
      other = __shfl_xor_sync(~0u, x, distance);
    } else {
      __syncthreads();
      if (d < kDim) outs[1][0][d] = x;
      __syncthreads();
      other = d < kDim ? outs[1][0][d ^ distance] : 0.f;
    }
    x = d & distance ? other - x : x + other;
  }
  if (d >= kDim) return;
  const i64 to = (static_cast<i64>(unit / p.kv_heads) * p.queries + column / p.group) * (p.kv_heads * p.group) + head;
  const float value = sum != 0.f ? (plain + x * rsqrtf(static_cast<float>(kBlock))) / sum : 0.f;
  p.out[to * kDim + d] = static_cast<unsigned short>(pair_of(In{}, value, 0.f));
  if (p.lse && d == 0) p.lse[to] = sum != 0.f ? (m + log2f(sum)) * kLn2 : -kInfinity;
}
