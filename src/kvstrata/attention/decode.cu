// Attention of a few queries over the pages of all tiers: a warp takes stages off the work list and keeps one streaming
// softmax in registers for as long as they belong to the same KV head and kind.
//
//   page --bulk copy--> ring in shared memory --16-byte loads--> words --masks--> A operands
//   K: tokens are the 16 rows of the product, columns (query heads of the KV head, times queries) its 8 columns
//   V: dims are the rows; the weights are transposed between the two products by movmatrix
//
// With kMass the same way is gone over K alone, after combine.cu: m is then the log of the sum of all weights, and what is
// written is the weight of every token, summed over the columns.
//
// Scores are in powers of two. The reference m of a column is such that weight * (scale of V) fits fp16; it is not the
// largest score, and changes only when a stage does not fit (`rebase`): one vote a stage instead of a reduction.
#include "mma.cuh"
#include "operands.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "warp.cuh"
#include "work.cuh"

using i64 = long long;

struct Params {
  const char* q;          // [rows, queries, heads, D]
  const Stage* stages;    // the layer's
  const int* starts;
  const int* requests;    // [rows], or null
  const int* lengths;     // [requests], stride in ints below
  const float* centre;    // [requests, kv heads, D], stride below
  float* partial_out;     // [slots, column blocks, columns, D]; kMass: the mass [rows, kv heads, mass_length], zeros
  float2* partial_sum;    // [slots, column blocks, columns]: m, l
  const float* lse;       // kMass: [rows, queries, heads]
  i64 q_row, q_query, q_head;  // strides in bytes
  i64 length_stride, centre_request;
  int queries, group, kv_heads, chunks;
  float scale_log2, softcap_log2;  // softcap 0: none
  int window, position_bytes;      // window 0: none; position_bytes 0: positions are not read
  int mass_length, ordered;        // whether positions decide what is seen
  i64 row_bytes, v_offset;         // rows in pages: from one token to the next, from K to V; 0: pages of a tiered cache
};

constexpr float kNone = -1e30f;

__device__ __forceinline__ float2 halves_of(unsigned x) {
  return make_float2(to_float(f16{static_cast<unsigned short>(x)}), to_float(f16{static_cast<unsigned short>(x >> 16)}));
}

// One tier: widths of K and V; 16 bits are plain rows of In.
template <int kKBits, int kVBits>
struct Tier {
  static constexpr int kK = kKBits, kV = kVBits;
  static constexpr bool kPlain = kKBits == 16;
};

// How a page of a tier comes in: in parts of kTokens tokens, each one stage.
template <class T, int kDim, int kPageTokens>
struct Part {
  static constexpr int kSteps = kDim / 16, kTiles = kPageTokens / 16, kLimit = 8704;
  template <int kBits> static constexpr bool whole_tiles = kSteps * kBits % 16 == 0 && kBits != 3;
  static constexpr bool kCuts = T::kPlain || (whole_tiles<T::kK> && whole_tiles<T::kV>);
  static __device__ constexpr int bytes_of(int tiles) {
    return T::kPlain ? tiles * 16 * kDim * 4
                     : code_bytes(T::kK, tiles) + code_bytes(T::kV, tiles) + tiles * 64;
  }
  static __device__ constexpr int code_bytes(int bits, int tiles) {
    const int n = tiles * kSteps;
    return 128 * (bits == 3 ? (n * 2 + 3) / 4 + (n + 3) / 4 : (n * bits + 3) / 4);
  }
  static __device__ constexpr int tiles_of() {
    int tiles = kTiles;
    while (kCuts && tiles > 1 && bytes_of(tiles) > kLimit) tiles /= 2;
    return tiles;
  }
  static constexpr int kMine = tiles_of(), kTokens = kMine * 16, kParts = kTiles / kMine;
  static constexpr int kKBytes = T::kPlain ? kTokens * kDim * 2 : code_bytes(T::kK, kMine);
  static constexpr int kVBytes = T::kPlain ? kTokens * kDim * 2 : code_bytes(T::kV, kMine);
  static constexpr int kScaleBytes = T::kPlain ? 0 : kMine * 64;
  static constexpr int kBytes = kKBytes + kVBytes + kScaleBytes;  // positions follow
  static constexpr int kPageBytes = bytes_of(kTiles);
};

template <class... Ts> struct Tiers {};

// Bytes of a slot of the ring: the largest stage of any tier, and positions.
template <int kDim, int kPageTokens, class... Ts>
__device__ constexpr int slot_bytes(Tiers<Ts...>) {
  int most = 0;
  ((most = Part<Ts, kDim, kPageTokens>::kBytes > most ? Part<Ts, kDim, kPageTokens>::kBytes : most), ...);
  return most + kPageTokens * 4;
}

// A column of the products: a query and a query head of the KV head. A lane has columns 2t and 2t + 1 of each block of 8.
template <int kDim, int kN>
struct State {
  static constexpr int kSteps = kDim / 16;
  unsigned q[kN][kSteps][2];  // B operands; rotated, fp16, as long as fits (lossy), or as they are (plain)
  float out[kN][kSteps][4];
  float m[kN][2], l[kN][2];
  float weights[kN][4];  // of the stage, summed by the tensor cores; every row is the same
  float middle[kN][2];   // sum of a column's q
  float centre[kN][2];   // score of the centre, in powers of two
  float score;           // what makes a product of q a score in powers of two
  int shift;             // how much smaller the second half of q stands
  int unit;              // rows g + 8 of `out` are times 2^-unit; rows g times 2^-24
  int last[kN][2];       // the last position that the column sees; without positions not used
  bool fresh;
};

template <class In>
__device__ __forceinline__ float2 pair_to_float(unsigned x) {
  return make_float2(to_float(In{static_cast<unsigned short>(x)}), to_float(In{static_cast<unsigned short>(x >> 16)}));
}

// From the lane that has column g (any t) to those that have columns 2t and 2t + 1.
__device__ __forceinline__ void to_columns(float of_g, float (&columns)[2]) {
  const int t = threadIdx.x & 3;
  columns[0] = __shfl_sync(~0u, of_g, 8 * t);
  columns[1] = __shfl_sync(~0u, of_g, 8 * t + 4);
}
__device__ __forceinline__ float sum_over_t(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Dims of the plain product: element e of a lane's chunk of step s. Chunks are 16 bytes of a pair of steps, and 8 bytes
// of a last odd step, so that a lane loads them at once.
template <int kDim>
__device__ __forceinline__ int plain_dim(int s, int part) {
  const int t = threadIdx.x & 3;
  if (kDim % 32 && s == kDim / 16 - 1) return 16 * s + 4 * t + 2 * part;
  return 32 * (s / 2) + 8 * t + 4 * (s % 2) + 2 * part;
}

template <class In, bool kMass, int kDim, int kN>
__device__ __forceinline__ void begin_group(const Params& p, State<kDim, kN>& st, int group, int block) {
  constexpr int kSteps = kDim / 16;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int unit = group >> 1, head = unit % p.kv_heads, row = unit / p.kv_heads;
  const bool lossy = group & 1;
  const int request = p.requests ? __ldg(p.requests + row) : row;
  const int columns = p.queries * p.group;
  st.fresh = true;
  st.shift = 0;
  st.unit = 24;
  float largest = 0.f;
#pragma unroll
  for (int n = 0; n < kN; n++) {
    const int column = (block * kN + n) * 8 + g;
    const bool there = column < columns;
    const char* from = p.q + row * p.q_row + column / p.group * p.q_query + (head * p.group + column % p.group) * p.q_head;
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const int dim = lossy ? 16 * s + 2 * t + 8 * part : plain_dim<kDim>(s, part);
        st.q[n][s][part] = there ? *reinterpret_cast<const unsigned*>(from + dim * 2) : 0u;
        st.out[n][s][2 * part] = st.out[n][s][2 * part + 1] = 0.f;
      }
    st.m[n][0] = st.m[n][1] = st.l[n][0] = st.l[n][1] = 0.f;
    st.centre[n][0] = st.centre[n][1] = st.middle[n][0] = st.middle[n][1] = 0.f;
    if (p.ordered) {
      const int length = __ldg(p.lengths + request * p.length_stride);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int mine = (block * kN + n) * 8 + 2 * t + c;
        st.last[n][c] = length - p.queries + mine / p.group;
        if constexpr (kMass) {  // columns that are not there, or see nothing, have no weight
          float lse = -kNone;
          if (mine < columns)
            lse = __ldg(p.lse + (static_cast<i64>(row) * p.queries + mine / p.group) * (p.kv_heads * p.group) + head * p.group +
                        mine % p.group);
          st.m[n][c] = lse > kNone ? lse * 1.4426950408889634f : -kNone;
        }
      }
    }
  }
  st.score = p.scale_log2;
  if (!lossy) return;

  // Rotate 16 dims by a product with a matrix of +-1, the rest by butterflies over steps.
  unsigned h[2][2];
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int part = 0; part < 2; part++) {
      const int in = 2 * t + 8 * part, to = 8 * n + g;
      h[n][part] = pair_of(In{}, __popc(in & to) & 1 ? -1.f : 1.f, __popc((in + 1) & to) & 1 ? -1.f : 1.f);
    }
  const float* centre = p.centre + request * p.centre_request + head * kDim;
#pragma unroll
  for (int n = 0; n < kN; n++) {
    float dot = 0.f;
    auto& x = st.out[n];  // not in use yet
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const float2 pair = pair_to_float<In>(st.q[n][s][part]);
        const float2 c = __ldg(reinterpret_cast<const float2*>(centre + 16 * s + 2 * t + 8 * part));
        dot += pair.x * c.x + pair.y * c.y;
      }
      const unsigned a[4] = {st.q[n][s][0], 0u, st.q[n][s][1], 0u};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float c[4] = {0.f, 0.f, 0.f, 0.f};
        mma_16x8x16(In{}, c, a, h[half][0], h[half][1]);
        x[s][2 * half] = c[0];
        x[s][2 * half + 1] = c[1];
      }
    }
    to_columns(sum_over_t(dot) * p.scale_log2, st.centre[n]);
    constexpr int kBlock = kSteps & -kSteps;
#pragma unroll
    for (int d = 1; d < kBlock; d *= 2)
#pragma unroll
      for (int s = 0; s < kSteps; s++)
        if (!(s & d))
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const float sum = x[s][i] + x[s + d][i], difference = x[s][i] - x[s + d][i];
            x[s][i] = sum;
            x[s + d][i] = difference;
          }
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        largest = fmaxf(largest, fabsf(x[s][i]));
  }
  if (__any_sync(~0u, largest > 1e38f)) {  // an infinite query must not make its neighbours small
    largest = 0.f;
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int s = 0; s < kSteps; s++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (fabsf(st.out[n][s][i]) <= 1e38f) largest = fmaxf(largest, fabsf(st.out[n][s][i]));
  }
#pragma unroll
  for (int d = 1; d < 32; d *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  // The largest becomes 2^14 to 2^15; a power of two, so nothing is rounded that fp16 would have kept.
  const int exponent = static_cast<int>(__float_as_uint(fmaxf(largest, 1e-30f)) >> 23) - 127;
  const int power = min(max(14 - exponent, -126), 126);
  const float longer = __uint_as_float(static_cast<unsigned>(127 + power) << 23);
  constexpr int kBlock = kSteps & -kSteps;
  constexpr float kFactor = kBlock == 1 ? 0.25f : kBlock == 2 ? 0.17677669529663687f : kBlock == 4 ? 0.125f
                          : kBlock == 8 ? 0.08838834764831845f : 0.0625f;
  st.score = p.scale_log2 * kFactor * __uint_as_float(static_cast<unsigned>(127 - power) << 23);
#pragma unroll
  for (int n = 0; n < kN; n++) {
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int part = 0; part < 2; part++) {
        const unsigned pair = pair_of(f16{}, st.out[n][s][2 * part] * longer, st.out[n][s][2 * part + 1] * longer);
        st.q[n][s][part] = pair;
        const float2 rounded = halves_of(pair);
        sum += rounded.x + rounded.y;
        st.out[n][s][2 * part] = st.out[n][s][2 * part + 1] = 0.f;
      }
    to_columns(sum_over_t(sum), st.middle[n]);
  }
}

// The second half of q, for K of other widths: exact but for what is 2^-24 of the largest.
template <int kDim, int kN>
__device__ __forceinline__ void shift_query(State<kDim, kN>& st, int shift) {
  if (st.shift == shift) return;
  const unsigned power = static_cast<unsigned>(st.shift - shift + 15) << 10;
  st.shift = shift;
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int s = 0; s < kDim / 16; s++)
      st.q[n][s][1] = multiply_pair(f16{}, st.q[n][s][1], power | power << 16);
}

// The unit of rows g + 8, for V of other widths.
template <int kDim, int kN>
__device__ __forceinline__ void change_unit(State<kDim, kN>& st, int unit) {
  if (st.unit == unit) return;
  const float power = __uint_as_float(static_cast<unsigned>(st.unit - unit + 127) << 23);
  st.unit = unit;
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int s = 0; s < kDim / 16; s++) {
      st.out[n][s][2] *= power;
      st.out[n][s][3] *= power;
    }
}

// Scores of a stage, already less m: x[tile][column block][row (token g, g + 8)][column]. Scales of V beside them.
template <int kTiles, int kN>
struct Scores {
  float x[kTiles][kN][2][2];
  float v[kTiles][2];
};

// Softcap, and what may not be seen: past the count, after the query, before its window.
template <int kTiles, int kDim, int kN>
__device__ __forceinline__ void mask(const Params& p, const State<kDim, kN>& st, Scores<kTiles, kN>& sc, int tokens,
                                  const unsigned char* positions, int first) {
  const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = i * 16 + g + 8 * r;
      const bool there = token < tokens;
      int position = first + token;
      if (p.position_bytes == 2) position = reinterpret_cast<const unsigned short*>(positions)[token];
      if (p.position_bytes == 4) position = reinterpret_cast<const int*>(positions)[token];
      if (!there) sc.v[i][r] = 0.f;
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float& x = sc.x[i][n][r][c];
          if (p.softcap_log2 > 0.f) {
            const float y = __fdividef(x + st.m[n][c], p.softcap_log2);
            const float e = exp2_of(2.885390081777927f * fabsf(y));
            x = p.softcap_log2 * copysignf(1.f - __fdividef(2.f, e + 1.f), y) - st.m[n][c];
          }
          bool seen = there;
          if (p.ordered) {
            seen = seen && position <= st.last[n][c];
            if (p.window) seen = seen && position > st.last[n][c] - p.window;
          }
          if (!seen) x = kNone;
        }
    }
}

// A new reference for every column, from the stage at hand; what was summed up moves along.
template <int kTiles, int kDim, int kN>
__device__ __forceinline__ void rebase(State<kDim, kN>& st, Scores<kTiles, kN>& sc) {
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float d = kNone;
#pragma unroll
      for (int i = 0; i < kTiles; i++)
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (sc.x[i][n][r][c] > kNone) d = fmaxf(d, sc.x[i][n][r][c] + log2_of(fmaxf(sc.v[i][r], 5.9604645e-8f)));
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) d = fmaxf(d, __shfl_xor_sync(~0u, d, lanes));
      if (d <= kNone) d = 0.f;        // nothing is seen
      if (!st.fresh) d = fmaxf(d, 0.f);
      st.m[n][c] += d;
      const float shrink = exp2_of(-d);
      if (!st.fresh) {
        st.l[n][c] *= shrink;
#pragma unroll
        for (int s = 0; s < kDim / 16; s++) {
          st.out[n][s][c] *= shrink;
          st.out[n][s][2 + c] *= shrink;
        }
        st.weights[n][c] *= shrink;
      }
#pragma unroll
      for (int i = 0; i < kTiles; i++)
#pragma unroll
        for (int r = 0; r < 2; r++)
          if (sc.x[i][n][r][c] > kNone) sc.x[i][n][r][c] -= d;
    }
  st.fresh = false;
}

// Scores to weights for the second product, in W; true if all of them fit.
template <class W, int kTiles, int kDim, int kN>
__device__ __forceinline__ bool weigh(const State<kDim, kN>& st, const Scores<kTiles, kN>& sc,
                                      unsigned (&w)[kTiles][kN][2], float (&l)[kN][2]) {
  unsigned most = 0u;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < kN; n++) l[n][0] = l[n][1] = 0.f;
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float a = exp2_of(sc.x[i][n][r][0]), b = exp2_of(sc.x[i][n][r][1]);
        l[n][0] += a;
        l[n][1] += b;
        w[i][n][r] = pair_of(W{}, a * sc.v[i][r], b * sc.v[i][r]);
        most = max_pair(W{}, most, w[i][n][r]);
      }
#pragma unroll
  for (int n = 0; n < kN; n++) sum = fmaxf(sum, fmaxf(l[n][0], l[n][1]));
  const float2 top = pair_to_float<W>(most);
  const bool fits = fmaxf(top.x, top.y) < 16384.f && sum < 1e18f;
  return !__any_sync(~0u, !fits || st.fresh);
}

template <class W, int kTiles, int kDim, int kN>
__device__ __forceinline__ void soften(const Params& p, State<kDim, kN>& st, Scores<kTiles, kN>& sc, int tokens,
                                       const unsigned char* positions, int first, unsigned (&w)[kTiles][kN][2]) {
  if (tokens < kTiles * 16 || p.ordered || p.softcap_log2 > 0.f) mask<kTiles>(p, st, sc, tokens, positions, first);
  float l[kN][2];
  if (!weigh<W>(st, sc, w, l)) {
    rebase<kTiles>(st, sc);
    weigh<W>(st, sc, w, l);
  }
#pragma unroll
  for (int n = 0; n < kN; n++) {
    st.l[n][0] += l[n][0];
    st.l[n][1] += l[n][1];
  }
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int r = 0; r < 2; r++) w[i][n][r] = transpose8x8(w[i][n][r]);
}

// The weight of every token, all columns together, to its position.
template <int kTiles, int kDim, int kN>
__device__ __forceinline__ void share_mass(const Params& p, const State<kDim, kN>& st, Scores<kTiles, kN>& sc, int group,
                                           int tokens, const unsigned char* positions, int first) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
  mask<kTiles>(p, st, sc, tokens, positions, first);
  float* mass = p.partial_out + static_cast<i64>(group >> 1) * p.mass_length;
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sum = 0.f;
#pragma unroll
      for (int n = 0; n < kN; n++) sum += exp2_of(sc.x[i][n][r][0]) + exp2_of(sc.x[i][n][r][1]);
      sum = sum_over_t(sum);
      const int token = i * 16 + g + 8 * r;
      if ((lane & 3) || token >= tokens) continue;
      const int position = p.position_bytes == 2   ? reinterpret_cast<const unsigned short*>(positions)[token]
                           : p.position_bytes == 4 ? reinterpret_cast<const int*>(positions)[token]
                                                   : first + token;
      atomicAdd(mass + position, sum);
    }
}

// A stage of codes, kUnit tiles at a time: enough for the tensor cores to have work, and little code.
template <class T, class P, bool kMass, int kDim, int kN>
__device__ __forceinline__ void attend_codes(const Params& p, State<kDim, kN>& st, const unsigned char* stage, int tokens,
                                             int group) {
  constexpr int kSteps = kDim / 16, kMost = kDim <= 64 || (T::kK <= 3 && T::kV <= 3) ? 4 : 2, kUnit = P::kMine < kMost ? P::kMine : kMost;
  using KWords = Words<T::kK, kSteps, P::kMine, kUnit>;
  using VWords = Words<T::kV, kSteps, P::kMine, kUnit>;
  const int g = (threadIdx.x & 31) >> 2;
  const unsigned char *v_codes = stage + P::kKBytes, *scales = v_codes + P::kVBytes;
  shift_query(st, kQueryShift<T::kK>);
  change_unit(st, place<T::kV>(1));
  constexpr float kUnit0 = 16777216.f, kUnit1 = place<T::kK>(1) == 24   ? 16777216.f
                                                : place<T::kK>(1) == 22 ? 4194304.f
                                                                        : 1048576.f;  // 2^place of rows g and g + 8
#pragma unroll
  for (int n = 0; n < kN; n++) st.weights[n][0] = st.weights[n][1] = st.weights[n][2] = st.weights[n][3] = 0.f;
  const auto attend_unit = [&](int unit) {
    Scores<kUnit, kN> sc;
    KWords words;
    words.load_unit(stage, unit);
    float s[kUnit][kN][4];
#pragma unroll
    for (int i = 0; i < kUnit; i++)
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) s[i][n][c] = st.middle[n][c & 1] * (-middle<T::kK>() / (c < 2 ? kUnit0 : kUnit1));
#pragma unroll
    for (int k = 0; k < kSteps; k++)
#pragma unroll
      for (int i = 0; i < kUnit; i++) {
        unsigned a[4];
        words.codes(unit, i, k, a);
#pragma unroll
        for (int n = 0; n < kN; n++) mma_16x8x16(f16{}, s[i][n], a, st.q[n][k][0], st.q[n][k][1]);
      }
#pragma unroll
    for (int i = 0; i < kUnit; i++) {
      const uint2 scale = *reinterpret_cast<const uint2*>(scales + (unit * kUnit + i) * 64 + g * 8);
      const float2 ks = halves_of(scale.x), vs = halves_of(scale.y);
      const float k0 = ks.x * (st.score * kUnit0), k1 = ks.y * (st.score * kUnit1);
#pragma unroll
      for (int n = 0; n < kN; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const float bias = st.centre[n][c] - st.m[n][c];
          sc.x[i][n][0][c] = fmaf(s[i][n][c], k0, bias);
          sc.x[i][n][1][c] = fmaf(s[i][n][2 + c], k1, bias);
        }
      sc.v[i][0] = vs.x;
      sc.v[i][1] = vs.y * kSecondHalf<T::kV>;
    }
    unsigned w[kUnit][kN][2];
    const int before = unit * kUnit * 16;
    const unsigned char* positions = stage + P::kBytes + before * p.position_bytes;
    if constexpr (kMass) {
      share_mass<kUnit>(p, st, sc, group, tokens - before, positions, 0);
      return;
    }
    soften<f16, kUnit>(p, st, sc, tokens - before, positions, 0, w);

    constexpr unsigned kOnes = 0x00010001u, kOnes8 = kOnes << (24 - place<T::kV>(2));
    const unsigned ones[4] = {kOnes, kOnes, kOnes8, kOnes8};
    VWords values;
    values.load_unit(v_codes, unit);
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int i = 0; i < kUnit; i++) mma_16x8x16(f16{}, st.weights[n], ones, w[i][n][0], w[i][n][1]);
#pragma unroll
    for (int i = 0; i < kUnit; i++)
#pragma unroll
      for (int k = 0; k < kSteps; k++) {
        unsigned a[4];
        values.codes(unit, i, k, a);
#pragma unroll
        for (int n = 0; n < kN; n++) mma_16x8x16(f16{}, st.out[n][k], a, w[i][n][0], w[i][n][1]);
      }
  };
  const int units = (tokens + kUnit * 16 - 1) / (kUnit * 16);
  if constexpr (KWords::kRegular && VWords::kRegular) {
#pragma unroll 1
    for (int unit = 0; unit < units; unit++) attend_unit(unit);
  } else {
#pragma unroll
    for (int unit = 0; unit < P::kMine / kUnit; unit++)
      if (unit < units) attend_unit(unit);
  }
  if constexpr (kMass) return;
  // The middle of the levels times the sum of weights comes off, stage by stage: the sums stay small.
  constexpr float kLess0 = -middle<T::kV>(), kLess1 = kLess0 * (1 << (24 - place<T::kV>(1)));
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int k = 0; k < kSteps; k++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        st.out[n][k][c] = fmaf(kLess0, st.weights[n][c], st.out[n][k][c]);
        st.out[n][k][2 + c] = fmaf(kLess1, st.weights[n][c], st.out[n][k][2 + c]);
      }
}

// Dims of the plain second product: row `upper` (0: g, 1: g + 8) of its k-th result. Per 64 dims a lane has 8 in a row,
// per 32 left four, per 16 left two.
template <int kDim>
__device__ __forceinline__ int plain_out_dim(int k, int upper) {
  const int g = (threadIdx.x & 31) >> 2, block = k / 4 * 64, left = kDim - block, i = k % 4;
  if (left >= 64) return block + 8 * g + 4 * upper + i;
  if (left >= 32 && i < 2) return block + 4 * g + 2 * upper + i;
  return kDim - 16 + 2 * g + upper;
}

// Elements `e` of two tokens' words as one register.
__device__ __forceinline__ unsigned pair_tokens(const unsigned* a, const unsigned* b, int e) {
  return __byte_perm(a[e / 2], b[e / 2], e % 2 ? 0x7632 : 0x5410);
}

template <int kWords>
__device__ __forceinline__ void load_words(const unsigned char* from, unsigned* words) {
  if constexpr (kWords == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else if constexpr (kWords == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    words[0] = x.x, words[1] = x.y;
  } else {
    words[0] = *reinterpret_cast<const unsigned*>(from);
  }
}

// kProducts products whose rows are dims `base` on, 2 * kProducts of them in a row for each lane.
template <class In, int kProducts, int kDim, int kN>
__device__ __forceinline__ void attend_values(State<kDim, kN>& st, const unsigned char* rows, int k, int base,
                                              const unsigned (&w)[kN][2]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  unsigned x[4][kProducts];  // tokens 2t, 2t + 1, 2t + 8, 2t + 9
#pragma unroll
  for (int j = 0; j < 4; j++)
    load_words<kProducts>(rows + ((2 * t + j % 2 + j / 2 * 8) * kDim + base + 2 * kProducts * g) * 2, x[j]);
#pragma unroll
  for (int i = 0; i < kProducts; i++) {
    const unsigned a[4] = {pair_tokens(x[0], x[1], i), pair_tokens(x[0], x[1], i + kProducts),
                           pair_tokens(x[2], x[3], i), pair_tokens(x[2], x[3], i + kProducts)};
#pragma unroll
    for (int n = 0; n < kN; n++) mma_16x8x16(In{}, st.out[n][k + i], a, w[n][0], w[n][1]);
  }
}

// A stage of plain rows.
template <class In, class P, bool kMass, int kDim, int kN>
__device__ __forceinline__ void attend_rows(const Params& p, State<kDim, kN>& st, unsigned char* stage, int tokens, int group,
                                            int first) {
  constexpr int kSteps = kDim / 16, kTiles = P::kMine;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  unsigned char* v_rows = stage + P::kKBytes;
  if (!kMass && tokens < P::kTokens) {  // weight 0 times what stands there must be 0
    for (int i = tokens * kDim * 2 + lane * 16; i < P::kVBytes; i += 512)
      *reinterpret_cast<uint4*>(v_rows + i) = make_uint4(0, 0, 0, 0);
    Ring<1>::fence();
    __syncwarp();
  }
  Scores<kTiles, kN> sc;
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    float s[kN][4];
#pragma unroll
    for (int n = 0; n < kN; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
    const unsigned char* rows = stage + (i * 16 + g) * kDim * 2;
#pragma unroll
    for (int k = 0; k + 1 < kSteps; k += 2) {
      unsigned a[4], b[4];
      load_words<4>(rows + (16 * k + 8 * t) * 2, a);
      load_words<4>(rows + (8 * kDim + 16 * k + 8 * t) * 2, b);
      const unsigned one[4] = {a[0], b[0], a[1], b[1]}, two[4] = {a[2], b[2], a[3], b[3]};
#pragma unroll
      for (int n = 0; n < kN; n++) {
        mma_16x8x16(In{}, s[n], one, st.q[n][k][0], st.q[n][k][1]);
        mma_16x8x16(In{}, s[n], two, st.q[n][k + 1][0], st.q[n][k + 1][1]);
      }
    }
    if constexpr (kSteps % 2) {
      unsigned a[2], b[2];
      load_words<2>(rows + (16 * (kSteps - 1) + 4 * t) * 2, a);
      load_words<2>(rows + (8 * kDim + 16 * (kSteps - 1) + 4 * t) * 2, b);
      const unsigned one[4] = {a[0], b[0], a[1], b[1]};
#pragma unroll
      for (int n = 0; n < kN; n++) mma_16x8x16(In{}, s[n], one, st.q[n][kSteps - 1][0], st.q[n][kSteps - 1][1]);
    }
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        sc.x[i][n][0][c] = fmaf(s[n][c], st.score, -st.m[n][c]);
        sc.x[i][n][1][c] = fmaf(s[n][2 + c], st.score, -st.m[n][c]);
      }
    sc.v[i][0] = sc.v[i][1] = 1.f;
  }
  if constexpr (kMass) {
    share_mass<kTiles>(p, st, sc, group, tokens, stage + P::kBytes, first);
    return;
  }
  unsigned w[kTiles][kN][2];
  soften<In, kTiles>(p, st, sc, tokens, stage + P::kBytes, first, w);
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    const unsigned char* rows = v_rows + i * 16 * kDim * 2;
#pragma unroll
    for (int k = 0; k + 4 <= kSteps; k += 4) attend_values<In, 4>(st, rows, k, 16 * k, w[i]);
    constexpr int kDone = kSteps / 4 * 4;
    if constexpr (kSteps % 4 >= 2) attend_values<In, 2>(st, rows, kDone, 16 * kDone, w[i]);
    if constexpr (kSteps % 2) attend_values<In, 1>(st, rows, kSteps - 1, 16 * (kSteps - 1), w[i]);
  }
}

// What a warp has summed up over its stages of a group.
template <int kDim, int kN>
__device__ __forceinline__ void end_group(const Params& p, State<kDim, kN>& st, int group, int chunk, int block) {
  constexpr int kSteps = kDim / 16;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int columns = p.queries * p.group - block * 8 * kN;
  const i64 first = (static_cast<i64>(chunk + group) * gridDim.y + block) * (8 * kN);
  if (group & 1) {
    const float high = __uint_as_float(static_cast<unsigned>(st.unit + 127) << 23);
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int s = 0; s < kSteps; s++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          st.out[n][s][c] *= 16777216.f;
          st.out[n][s][2 + c] *= high;
        }
  }
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float l = st.l[n][c];
#pragma unroll
      for (int d = 4; d < 32; d *= 2) l += __shfl_xor_sync(~0u, l, d);
      const int column = n * 8 + 2 * t + c;
      if (column >= columns) continue;
      if (g == 0) p.partial_sum[first + column] = make_float2(st.m[n][c], l);
      float* to = p.partial_out + (first + column) * kDim;
      if (group & 1) {
        to += g;
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          to[16 * s] = st.out[n][s][c];
          to[16 * s + 8] = st.out[n][s][2 + c];
        }
      } else {
#pragma unroll
        for (int s = 0; s < kSteps; s++) {
          to[plain_out_dim<kDim>(s, 0)] = st.out[n][s][c];
          to[plain_out_dim<kDim>(s, 1)] = st.out[n][s][2 + c];
        }
      }
    }
}

// The tier's own code for a stage, found by its number.
template <class In, bool kMass, int kDim, int kPageTokens, int kN, int kNumber>
__device__ __forceinline__ void attend(Tiers<>, const Params&, State<kDim, kN>&, unsigned char*, unsigned, int) {}
template <class In, bool kMass, int kDim, int kPageTokens, int kN, int kNumber, class T, class... Ts>
__device__ __forceinline__ void attend(Tiers<T, Ts...>, const Params& p, State<kDim, kN>& st, unsigned char* stage,
                                       unsigned meta, int group) {
  using P = Part<T, kDim, kPageTokens>;
  if ((meta >> 8 & 0xff) == kNumber) {
    if constexpr (T::kPlain) attend_rows<In, P, kMass>(p, st, stage, meta & 0xff, group, static_cast<int>(meta >> 16) * P::kTokens);
    else attend_codes<T, P, kMass>(p, st, stage, meta & 0xff, group);
  } else {
    attend<In, kMass, kDim, kPageTokens, kN, kNumber + 1>(Tiers<Ts...>{}, p, st, stage, meta, group);
  }
}

// Bytes of a stage of a tier: K, V and scales, and how many stages a page is.
struct Sizes {
  int k, v, scales, parts, tokens;
};
template <int kDim, int kPageTokens, class... Ts>
__device__ __forceinline__ Sizes sizes_of(Tiers<Ts...>, int tier) {
  Sizes found = {};
  int number = 0;
  (
      [&] {
        using P = Part<Ts, kDim, kPageTokens>;
        if (tier == number++) found = {P::kKBytes, P::kVBytes, P::kScaleBytes, P::kParts, P::kTokens};
      }(),
      ...);
  return found;
}

template <bool kMass>
__device__ __forceinline__ void fill(Ring<2>& ring, int at, unsigned char* to, const Stage& stage, const Sizes& size,
                                     int position_bytes) {
  if (!ring.mine()) return;
  const char* page = reinterpret_cast<const char*>(stage.page);
  const int positions = size.tokens * position_bytes, codes = size.k + size.v + size.scales;
  ring.begin(at, codes + positions - (kMass ? size.v : 0));
  if (size.parts == 1 && !kMass) {
    ring.copy(at, to, page, codes + positions);
  } else {
    const int part = stage.meta >> 16;
    ring.copy(at, to, page + part * size.k, size.k);
    if (!kMass) ring.copy(at, to + size.k, page + size.parts * size.k + part * size.v, size.v);
    if (size.scales) ring.copy(at, to + size.k + size.v, page + size.parts * (size.k + size.v) + part * size.scales, size.scales);
    if (positions) ring.copy(at, to + codes, page + size.parts * codes + part * positions, positions);
  }
}

// Rows of a page of store_kv: together where they follow each other, else a lane a row, of K and of V.
template <bool kMass, int kDim>
__device__ __forceinline__ void fill_rows(const Params& p, Ring<2>& ring, int at, unsigned char* to, const Stage& stage,
                                          const Sizes& size) {
  constexpr int kRow = kDim * 2;
  const int lane = threadIdx.x & 31, tokens = stage.meta & 0xff, sides = kMass ? 1 : 2;
  const char* rows = reinterpret_cast<const char*>(stage.page);
  if (ring.mine()) ring.begin(at, sides * tokens * kRow);
  if (p.row_bytes == kRow) {
    if (!ring.mine()) return;
    ring.copy(at, to, rows, tokens * kRow);
    if (!kMass) ring.copy(at, to + size.k, rows + p.v_offset, tokens * kRow);
    return;
  }
  __syncwarp();
  for (int i = lane; i < sides * tokens; i += 32) {
    const int side = i >= tokens, token = i - side * tokens;
    ring.copy_of_lane(at, to + side * size.k + token * kRow, rows + side * p.v_offset + token * p.row_bytes, kRow);
  }
}

// kResident warps on a multiprocessor.
template <class In, bool kMass, bool kRows, int kDim, int kPageTokens, int kN, int kWarps, int kResident, class TierList>
__global__ void __launch_bounds__(kWarps * 32, kResident / kWarps) decode(const __grid_constant__ Params p) {
  constexpr int kSlot = slot_bytes<kDim, kPageTokens>(TierList{});
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ unsigned long long bars[kWarps * 2];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), block = blockIdx.y;
  unsigned char* slots = shared + warp * 2 * kSlot;
  Ring<2> ring(bars + warp * 2);
  wait_for_previous();
  release_next();

  for (int chunk = blockIdx.x * kWarps + warp; chunk < p.chunks; chunk += gridDim.x * kWarps) {
    const int first = p.starts[chunk], end = p.starts[chunk + 1];
    if (first >= end) continue;
    const auto produce = [&](int at, const Stage& stage) {
      const Sizes size = sizes_of<kDim, kPageTokens>(TierList{}, stage.meta >> 8 & 0xff);
      if constexpr (kRows) fill_rows<kMass, kDim>(p, ring, at, slots + at * kSlot, stage, size);
      else fill<kMass>(ring, at, slots + at * kSlot, stage, size, p.position_bytes);
    };
    Stage now = p.stages[first], next = p.stages[min(first + 1, end - 1)], after = p.stages[min(first + 2, end - 1)];
    produce(0, now);
    ring.commit();
    State<kDim, kN> st;
    int group = -1;
    for (int i = first; i < end; i++) {
      const int at = (i - first) & 1;
      if (i + 1 < end) produce(at ^ 1, next);
      ring.commit();
      if (now.group != group) {  // while the page is on its way
        if (group >= 0 && !kMass) end_group(p, st, group, chunk, block);
        group = now.group;
        begin_group<In, kMass>(p, st, group, block);
      }
      ring.wait(at, 2);
      attend<In, kMass, kDim, kPageTokens, kN, 0>(TierList{}, p, st, slots + at * kSlot, now.meta, group);
      __syncwarp();
      now = next;
      next = after;
      after = p.stages[min(i + 3, end - 1)];
    }
    if (!kMass) end_group(p, st, group, chunk, block);
    __syncwarp();
  }
}
