// Centres of K of places, each a (request, layer) in which nothing is quantised yet; the definition is centre.py.
//
//   sum     a block per place and KV head: means of its first tokens, plain and rotated back by either pairing, and the
//           squares of their lengths; rows far above the median magnitude are left out
//   finish  a block per place: the pairing with the longest means over all heads, rotated to the positions ahead;
//           a pairing that is known to be wrong is skipped. Also copies the direction of the place
//   store   a block per place: copies to the cache, when nothing can fail any more
//
// Sums are taken by position in the order of centre.py, 32 at a time: they depend only on the tokens of the head.
#include "fp8.cuh"
#include "numbers.cuh"
#include "page.cuh"

constexpr int kThreads = 1024, kTokens = 1024, kStride = 32, kChunks = kTokens / kStride, kAhead = 4;
constexpr float kFar = 32.f;  // FAR of centre.py
enum Pairing { kPlain, kHalves, kNeighbours, kPairings };

struct Params {
  const int* table;      // [requests, layers, heads, tiers, max_pages] handles
  const int* count;      // [requests, layers, heads, tiers]
  const i64* pointers;   // [slabs]
  const int* begun;      // [5, n]: request * layers + layer, index of the place, new tokens, their first row and position
  const int* places;     // [2, places]: request * layers + layer, number in `begun` or -1; [1, places] if n is 0
  const float2* turns;   // [kTokens, pairs] cos and sin at each position
  const float2* ahead;   // [n, pairs] their means over the positions of the horizon
  const char* k;         // new rows
  float* means;          // [n, heads, kPairings, D]
  float* lengths;        // [n, heads, kPairings]
  float* centres;        // [places, heads, D]
  float* stored;         // [requests, layers, heads, D], in the space of the model's K
  const signed char* balance;  // same shape, or null: rows, and `centres`, are divided by 2 to this power
  const signed char* direction;  // same shape, or null: of the error of K
  signed char* directions;       // [places, heads, D], copies of it
  i64 token_stride, head_stride;  // of new rows, in bytes
  int n, places_, heads, tiers, max_pages, units, page_shift, position_offset, dim, pairs;
  int skip;  // pairing that is not computed; kPlain is none
};

// 2 to the power of channel i, or its inverse; `powers` may be null.
__device__ __forceinline__ float factor(const signed char* powers, i64 i, bool inverse = false) {
  if (!powers) return 1.f;
  return __int_as_float((127 + (inverse ? -powers[i] : powers[i])) << 23);
}

// The two channels of pair i.
__device__ __forceinline__ int2 channels(int pairing, int i, int pairs) {
  return pairing == kHalves ? make_int2(i, i + pairs) : make_int2(2 * i, 2 * i + 1);
}

// Lower median over the block of the values that are not negative; NaN if there are none.
__device__ __forceinline__ float median(float x) {
  const int rank = (__syncthreads_count(x >= 0.f) - 1) / 2;
  int bits = 0;  // the largest number that at most `rank` values are below
  for (int bit = 1 << 30; bit; bit >>= 1) {
    const int more = bits | bit;
    if (__syncthreads_count(x >= 0.f && __float_as_int(x) < more) <= rank) bits = more;
  }
  return __int_as_float(bits);
}

// Set rows far above the median magnitude of all to null; `magnitudes` has room for all.
template <class In>
__device__ __forceinline__ void leave_out_far(const In** rows, float* magnitudes, const signed char* balance, i64 own,
                                              int dim) {
  const int lane = threadIdx.x % 32;
  for (int at = threadIdx.x / 32 * kAhead; at < kTokens; at += kThreads / 32 * kAhead) {
    float largest[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; j++) largest[j] = -1.f;  // of no value
    for (int channel = lane; channel < dim; channel += 32) {
      const float by = factor(balance, own + channel);
#pragma unroll
      for (int j = 0; j < kAhead; j++) {
        const In* row = rows[at + j];
        const float x = row ? fabsf(to_float(row[channel]) * by) : __int_as_float(0x7fffffff);
        if (x <= kLargest) largest[j] = fmaxf(largest[j], x);
      }
    }
#pragma unroll
    for (int j = 0; j < kAhead; j++) {
      for (int step = 16; step; step /= 2) largest[j] = fmaxf(largest[j], __shfl_xor_sync(~0u, largest[j], step));
      if (lane == 0) magnitudes[at + j] = largest[j];
    }
  }
  __syncthreads();
  const float mine = magnitudes[threadIdx.x], middle = median(mine);
  if (middle > 0.f && mine > kFar * middle) rows[threadIdx.x] = nullptr;
  __syncthreads();
}

template <class In, class Position>
__global__ void __launch_bounds__(kThreads) sum(const __grid_constant__ Params p) {
  extern __shared__ float partial[];  // [3, kChunks, D / 2]: sums of both channels, and their counts in 16 bits each
  __shared__ const In* rows[kTokens];  // by position, null for none
  __shared__ float squares[kPairings][kThreads / 32];
  const int number = blockIdx.x / p.heads, head = blockIdx.x % p.heads, columns = p.dim / 2;
  const i64 bucket = (static_cast<i64>(p.begun[number]) * p.heads + head) * p.tiers;
  const int fresh = p.k ? p.begun[2 * p.n + number] : 0, begin = p.begun[4 * p.n + number];
  {
    const int position = threadIdx.x;  // one per thread
    const i64 row = static_cast<i64>(p.begun[3 * p.n + number]) + position - begin;
    const bool is_new = position >= begin && position - begin < fresh;
    rows[position] = is_new ? reinterpret_cast<const In*>(p.k + row * p.token_stride + head * p.head_stride) : nullptr;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.count[bucket]; i += kThreads) {
    const char* page = page_address(p.pointers, p.units, p.table[bucket * p.max_pages + (i >> p.page_shift)]);
    const int slot = i & ((1 << p.page_shift) - 1);
    const int position = reinterpret_cast<const Position*>(page + p.position_offset)[slot];
    if (position >= 0 && position < kTokens) rows[position] = reinterpret_cast<const In*>(page) + slot * p.dim;
  }
  __syncthreads();
  leave_out_far(rows, partial, p.balance, bucket / p.tiers * p.dim, p.dim);

  const int column = threadIdx.x % columns, stripe = threadIdx.x / columns, stripes = kThreads / columns;
  float* const first = partial;
  float* const second = partial + kChunks * columns;
  int* const many = reinterpret_cast<int*>(partial + 2 * kChunks * columns);
  float plain = 0.f;  // squares of this thread's two channels
  for (int pairing = kPlain; pairing < (p.pairs ? kPairings : kHalves); pairing++) {
    if (pairing != kPlain && pairing == p.skip) continue;
    const bool turned = pairing != kPlain, takes_part = column < (turned ? p.pairs : columns);
    const int2 channel = channels(pairing, column, p.pairs);
    const i64 own = bucket / p.tiers * p.dim;
    const float by_x = factor(p.balance, own + channel.x), by_y = factor(p.balance, own + channel.y);
    for (int chunk = stripe; stripe < stripes && chunk < kChunks; chunk += stripes) {
      float x_sum = 0.f, y_sum = 0.f;
      int count = 0;
      for (int at = chunk * kStride; takes_part && at < (chunk + 1) * kStride; at += kAhead) {
        float x[kAhead], y[kAhead];
        float2 turn[kAhead];
#pragma unroll
        for (int j = 0; j < kAhead; j++) {
          const In* row = rows[at + j];
          x[j] = row ? to_float(row[channel.x]) * by_x : __int_as_float(0x7fffffff);
          y[j] = row ? to_float(row[channel.y]) * by_y : __int_as_float(0x7fffffff);
          turn[j] = turned ? p.turns[(at + j) * p.pairs + column] : make_float2(1.f, 0.f);
        }
#pragma unroll
        for (int j = 0; j < kAhead; j++) {
          bool has_x = fabsf(x[j]) <= kLargest, has_y = fabsf(y[j]) <= kLargest;
          if (turned) has_x = has_y = has_x && has_y;
          const float a = has_x ? x[j] : 0.f, b = has_y ? y[j] : 0.f;
          count += has_x + (has_y << 16);
          if (turned) {
            x_sum = __fadd_rn(x_sum, __fadd_rn(__fmul_rn(a, turn[j].x), __fmul_rn(b, turn[j].y)));
            y_sum = __fadd_rn(y_sum, __fsub_rn(__fmul_rn(b, turn[j].x), __fmul_rn(a, turn[j].y)));
          } else {
            x_sum = __fadd_rn(x_sum, a);
            y_sum = __fadd_rn(y_sum, b);
          }
        }
      }
      first[chunk * columns + column] = x_sum;
      second[chunk * columns + column] = y_sum;
      many[chunk * columns + column] = count;
    }
    __syncthreads();
    float square = pairing == kPlain || column < p.pairs ? 0.f : plain;
    if (threadIdx.x >= columns) square = 0.f;
    if (threadIdx.x < columns && takes_part) {
      float x = 0.f, y = 0.f;
      int count = 0;
      for (int chunk = 0; chunk < kChunks; chunk++) {
        x = __fadd_rn(x, first[chunk * columns + column]);
        y = __fadd_rn(y, second[chunk * columns + column]);
        count += many[chunk * columns + column];
      }
      x = __fdiv_rn(x, static_cast<float>(max(count & 0xffff, 1)));
      y = __fdiv_rn(y, static_cast<float>(max(count >> 16, 1)));
      float* mean = p.means + (static_cast<i64>(blockIdx.x) * kPairings + pairing) * p.dim;
      mean[channel.x] = x;
      mean[channel.y] = y;
      square = __fadd_rn(__fmul_rn(x, x), __fmul_rn(y, y));
      if (!turned) plain = square;
    }
    for (int step = 16; step; step /= 2) square = __fadd_rn(square, __shfl_xor_sync(~0u, square, step));
    if ((threadIdx.x & 31) == 0) squares[pairing][threadIdx.x / 32] = square;
    __syncthreads();
  }
  if (threadIdx.x < (p.pairs ? kPairings : kHalves) && (threadIdx.x == kPlain || threadIdx.x != p.skip)) {
    float length = 0.f;
    for (int warp = 0; warp < kThreads / 32; warp++) length = __fadd_rn(length, squares[threadIdx.x][warp]);
    p.lengths[blockIdx.x * kPairings + threadIdx.x] = length;
  }
}

template <class = void>
__global__ void __launch_bounds__(256) finish(const __grid_constant__ Params p) {
  const int place = blockIdx.x, size = p.heads * p.dim, number = p.n ? p.places[p.places_ + place] : -1;
  float* centre = p.centres + static_cast<i64>(place) * size;
  const i64 own = static_cast<i64>(p.places[place]) * size;
  if (p.direction)
    for (int i = threadIdx.x; i < size; i += 256) p.directions[static_cast<i64>(place) * size + i] = p.direction[own + i];
  if (number < 0) {
    for (int i = threadIdx.x; i < size; i += 256) centre[i] = p.stored[own + i] * factor(p.balance, own + i, true);
    return;
  }
  int pairing = kPlain;
  float longest = 0.f;
  for (int each = kPlain; each < (p.pairs ? kPairings : kHalves); each++) {
    if (each != kPlain && each == p.skip) continue;
    float length = 0.f;
    for (int head = 0; head < p.heads; head++)
      length = __fadd_rn(length, p.lengths[(static_cast<i64>(number) * p.heads + head) * kPairings + each]);
    if (each == kPlain || length > longest) {
      longest = length;
      pairing = each;
    }
  }
  for (int i = threadIdx.x; i < size; i += 256) {
    const int head = i / p.dim, c = i % p.dim;
    const float* means = p.means + (static_cast<i64>(number) * p.heads + head) * kPairings * p.dim;
    if (pairing == kPlain || c >= 2 * p.pairs) {
      centre[i] = means[c] * factor(p.balance, own + i, true);
      continue;
    }
    const int pair = pairing == kHalves ? c % p.pairs : c / 2;
    const int2 channel = channels(pairing, pair, p.pairs);
    const float x = means[pairing * p.dim + channel.x], y = means[pairing * p.dim + channel.y];
    const float2 turn = p.ahead[number * p.pairs + pair];
    const float turned = c == channel.x ? __fsub_rn(__fmul_rn(x, turn.x), __fmul_rn(y, turn.y))
                                        : __fadd_rn(__fmul_rn(y, turn.x), __fmul_rn(x, turn.y));
    centre[i] = turned * factor(p.balance, own + i, true);
  }
}

template <class = void>
__global__ void __launch_bounds__(256) store(const __grid_constant__ Params p) {
  const int size = p.heads * p.dim;
  const float* centre = p.centres + static_cast<i64>(p.begun[p.n + blockIdx.x]) * size;
  const i64 own = static_cast<i64>(p.begun[blockIdx.x]) * size;
  for (int i = threadIdx.x; i < size; i += 256) p.stored[own + i] = centre[i] * factor(p.balance, own + i);
}
