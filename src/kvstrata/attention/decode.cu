// Attention of a few queries over the pages of all tiers: a warp takes stages off the work list and keeps one streaming
// softmax in registers for as long as they belong to the same KV head and kind.
//
//   page --bulk copy--> ring in shared memory --16-byte loads--> words --masks--> A operands
//   K: tokens are the 16 rows of the product, columns (query heads of the KV head, times queries) its 8 columns
//   V: dims are the rows; the weights are transposed between the two products by movmatrix
//
// Scores are in powers of two. The reference m of a column is such that weight * (scale of V) fits fp16; it is not the
// largest score, and changes only when a stage does not fit (`rebase`): one vote a stage instead of a reduction.
#include "mma.cuh"
#include "operands.cuh"
#include "pdl.cuh"
#include "ring.cuh"
#include "work.cuh"

using i64 = long long;

struct Params {
  const char* q;          // [rows, queries, heads, D]
  const Stage* stages;    // the layer's
  const int* starts;
  const int* requests;    // [rows], or null
  const int* lengths;     // [requests], stride in ints below
  const float* centre;    // [requests, kv heads, D], stride below
  float* partial_out;     // [slots, column blocks, columns, D]
  float2* partial_sum;    // [slots, column blocks, columns]: m, l
  i64 q_row, q_query, q_head;  // strides in bytes
  i64 length_stride, centre_request;
  int queries, group, kv_heads, workers;
  float scale_log2, softcap_log2;  // softcap 0: none
  int window, position_bytes;      // window 0: none; position_bytes 0: positions are not needed
};

constexpr float kNone = -1e30f;

__device__ __forceinline__ float exp2_of(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ __forceinline__ float log2_of(float x) {
  float out;
  asm("lg2.approx.f32 %0,%1;" : "=f"(out) : "f"(x));
  return out;
}
__device__ __forceinline__ unsigned transpose8x8(unsigned x) {
  unsigned out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(out) : "r"(x));
  return out;
}
__device__ __forceinline__ unsigned max_halves(f16, unsigned a, unsigned b) {
  unsigned out;
  asm("max.f16x2 %0,%1,%2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
__device__ __forceinline__ unsigned max_halves(bf16, unsigned a, unsigned b) {
  unsigned out;
  asm("max.bf16x2 %0,%1,%2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}
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
template <class T, int kDim, int kPageTokens, int kLimit>
struct Part {
  static constexpr int kSteps = kDim / 16, kTiles = kPageTokens / 16;
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

// Bytes of a slot of the ring: of the largest stage of codes; plain rows may take two slots.
template <int kDim, int kPageTokens, int kLimit, class... Ts>
__device__ constexpr int slot_bytes(Tiers<Ts...>) {
  constexpr int kPositions = kPageTokens * 4;
  int most = 0;
  (
      [&] {
        using P = Part<Ts, kDim, kPageTokens, kLimit>;
        const int bytes = Ts::kPlain && sizeof...(Ts) > 1 ? (P::kBytes + kPositions + 1) / 2 : P::kBytes + kPositions;
        most = bytes > most ? bytes : most;
      }(),
      ...);
  return (most + 127) / 128 * 128;
}

// A column of the products: a query and a query head of the KV head. A lane has columns 2t and 2t + 1 of each block of 8.
template <int kDim, int kN>
struct State {
  static constexpr int kSteps = kDim / 16;
  unsigned q[kN][kSteps][2];  // B operands; rotated, fp16, as long as fits (lossy), or as they are (plain)
  float out[kN][kSteps][4];
  float m[kN][2], l[kN][2];
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

template <class In, int kDim, int kN>
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
    if (p.position_bytes) {
      const int length = __ldg(p.lengths + request * p.length_stride);
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int mine = (block * kN + n) * 8 + 2 * t + c;
        st.last[n][c] = length - p.queries + mine / p.group;
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
    float dot = 0.f, x[kSteps][4];
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
    // Kept as float32 pairs in `out`, which is not in use yet, until the largest of all columns is known.
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        st.out[n][s][i] = x[s][i];
        const float size = fabsf(x[s][i]);
        if (size < 1e38f) largest = fmaxf(largest, size);
      }
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
      asm("mul.f16x2 %0,%0,%1;" : "+r"(st.q[n][s][1]) : "r"(power | power << 16));
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
                                  const unsigned char* positions) {
  const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
  for (int i = 0; i < kTiles; i++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int token = i * 16 + g + 8 * r;
      const bool there = token < tokens;
      int position = 0;
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
          if (p.position_bytes) {
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
        most = max_halves(W{}, most, w[i][n][r]);
      }
#pragma unroll
  for (int n = 0; n < kN; n++) sum = fmaxf(sum, fmaxf(l[n][0], l[n][1]));
  const float2 top = pair_to_float<W>(most);
  const bool fits = fmaxf(top.x, top.y) < 16384.f && sum < 1e18f;
  return !__any_sync(~0u, !fits || st.fresh);
}

template <class W, int kTiles, int kDim, int kN>
__device__ __forceinline__ void soften(const Params& p, State<kDim, kN>& st, Scores<kTiles, kN>& sc, int tokens,
                                       const unsigned char* positions, unsigned (&w)[kTiles][kN][2]) {
  if (tokens < kTiles * 16 || p.position_bytes || p.softcap_log2 > 0.f) mask<kTiles>(p, st, sc, tokens, positions);
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

// A stage of codes.
template <class T, class P, int kDim, int kN>
__device__ __forceinline__ void attend_codes(const Params& p, State<kDim, kN>& st, const unsigned char* stage, int tokens) {
  constexpr int kSteps = kDim / 16, kTiles = P::kMine;
  const int g = (threadIdx.x & 31) >> 2;
  const unsigned char *v_codes = stage + P::kKBytes, *scales = v_codes + P::kVBytes;
  shift_query(st, kQueryShift<T::kK>);
  constexpr float kUnit0 = 16777216.f, kUnit1 = place<T::kK>(1) == 24   ? 16777216.f
                                                : place<T::kK>(1) == 22 ? 4194304.f
                                                                        : 1048576.f;  // 2^place of rows g and g + 8
  Scores<kTiles, kN> sc;
  float first[kN][2][2], bias[kN][2];
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      first[n][0][c] = -middle<T::kK>() * st.middle[n][c] / kUnit0;
      first[n][1][c] = -middle<T::kK>() * st.middle[n][c] / kUnit1;
      bias[n][c] = st.centre[n][c] - st.m[n][c];
    }
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    Words<T::kK, kSteps, kTiles> words;
    words.load_tile(stage, i);
    const uint2 scale = *reinterpret_cast<const uint2*>(scales + i * 64 + g * 8);
    float s[kN][4];
#pragma unroll
    for (int n = 0; n < kN; n++) s[n][0] = first[n][0][0], s[n][1] = first[n][0][1], s[n][2] = first[n][1][0], s[n][3] = first[n][1][1];
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      unsigned a[4];
      words.codes(i, k, a);
#pragma unroll
      for (int n = 0; n < kN; n++) mma_16x8x16(f16{}, s[n], a, st.q[n][k][0], st.q[n][k][1]);
    }
    const float2 ks = halves_of(scale.x), vs = halves_of(scale.y);
    const float k0 = ks.x * (st.score * kUnit0), k1 = ks.y * (st.score * kUnit1);
#pragma unroll
    for (int n = 0; n < kN; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        sc.x[i][n][0][c] = fmaf(s[n][c], k0, bias[n][c]);
        sc.x[i][n][1][c] = fmaf(s[n][2 + c], k1, bias[n][c]);
      }
    sc.v[i][0] = vs.x;
    sc.v[i][1] = vs.y * kSecondHalf<T::kV>;
  }
  unsigned w[kTiles][kN][2];
  soften<f16, kTiles>(p, st, sc, tokens, stage + P::kBytes, w);

  // The middle of the levels times the sum of weights, as the tensor cores sum them, comes off first.
  change_unit(st, place<T::kV>(1));
  constexpr unsigned kOnes = 0x00010001u, kOnes8 = kOnes << (24 - place<T::kV>(2));
  const unsigned ones[4] = {kOnes, kOnes, kOnes8, kOnes8};
#pragma unroll
  for (int n = 0; n < kN; n++) {
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kTiles; i++) mma_16x8x16(f16{}, sum, ones, w[i][n][0], w[i][n][1]);
    constexpr float kLess0 = -middle<T::kV>(), kLess1 = kLess0 * (1 << (24 - place<T::kV>(1)));
#pragma unroll
    for (int k = 0; k < kSteps; k++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        st.out[n][k][c] = fmaf(kLess0, sum[c], st.out[n][k][c]);
        st.out[n][k][2 + c] = fmaf(kLess1, sum[c], st.out[n][k][2 + c]);
      }
  }
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    Words<T::kV, kSteps, kTiles> words;
    words.load_tile(v_codes, i);
#pragma unroll
    for (int k = 0; k < kSteps; k++) {
      unsigned a[4];
      words.codes(i, k, a);
#pragma unroll
      for (int n = 0; n < kN; n++) mma_16x8x16(f16{}, st.out[n][k], a, w[i][n][0], w[i][n][1]);
    }
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
template <class In, class P, int kDim, int kN>
__device__ __forceinline__ void attend_rows(const Params& p, State<kDim, kN>& st, unsigned char* stage, int tokens) {
  constexpr int kSteps = kDim / 16, kTiles = P::kMine;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  unsigned char* v_rows = stage + P::kKBytes;
  if (tokens < P::kTokens) {  // weight 0 times what stands there must be 0
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
  unsigned w[kTiles][kN][2];
  soften<In, kTiles>(p, st, sc, tokens, stage + P::kBytes, w);
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
__device__ __forceinline__ void end_group(const Params& p, State<kDim, kN>& st, int group, int worker, int block) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, columns = p.queries * p.group;
  const bool lossy = group & 1;
  const float low_unit = lossy ? 16777216.f : 1.f;
  const float high_unit = lossy ? __uint_as_float(static_cast<unsigned>(st.unit + 127) << 23) : 1.f;
  const i64 first = (static_cast<i64>(worker + group) * gridDim.y + block) * (8 * kN);
#pragma unroll
  for (int n = 0; n < kN; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      float l = st.l[n][c];
#pragma unroll
      for (int d = 4; d < 32; d *= 2) l += __shfl_xor_sync(~0u, l, d);
      const int column = n * 8 + 2 * t + c;
      if (block * 8 * kN + column >= columns) continue;
      if (g == 0) p.partial_sum[first + column] = make_float2(st.m[n][c], l);
      float* to = p.partial_out + (first + column) * kDim;
#pragma unroll
      for (int s = 0; s < kDim / 16; s++) {
        const int low = lossy ? 16 * s + g : plain_out_dim<kDim>(s, 0), high = lossy ? low + 8 : plain_out_dim<kDim>(s, 1);
        to[low] = st.out[n][s][c] * low_unit;
        to[high] = st.out[n][s][2 + c] * high_unit;
      }
    }
}

// The tier's own code for a stage, found by its number.
template <class In, int kDim, int kPageTokens, int kLimit, int kN, int kNumber>
__device__ __forceinline__ void attend(Tiers<>, const Params&, State<kDim, kN>&, unsigned char*, int, int) {}
template <class In, int kDim, int kPageTokens, int kLimit, int kN, int kNumber, class T, class... Ts>
__device__ __forceinline__ void attend(Tiers<T, Ts...>, const Params& p, State<kDim, kN>& st, unsigned char* stage, int tokens,
                                       int tier) {
  using P = Part<T, kDim, kPageTokens, kLimit>;
  if (tier == kNumber) {
    if constexpr (T::kPlain) attend_rows<In, P>(p, st, stage, tokens);
    else attend_codes<T, P>(p, st, stage, tokens);
  } else {
    attend<In, kDim, kPageTokens, kLimit, kN, kNumber + 1>(Tiers<Ts...>{}, p, st, stage, tokens, tier);
  }
}

template <int kDim, int kPageTokens, int kLimit, int kNumber>
__device__ __forceinline__ void fill(Tiers<>, Ring<2>&, int, unsigned char*, const Stage&, int) {}
template <int kDim, int kPageTokens, int kLimit, int kNumber, class T, class... Ts>
__device__ __forceinline__ void fill(Tiers<T, Ts...>, Ring<2>& ring, int at, unsigned char* to, const Stage& stage,
                                     int position_bytes) {
  using P = Part<T, kDim, kPageTokens, kLimit>;
  if ((stage.meta >> 8 & 0xff) != kNumber) {
    fill<kDim, kPageTokens, kLimit, kNumber + 1>(Tiers<Ts...>{}, ring, at, to, stage, position_bytes);
    return;
  }
  const char* page = reinterpret_cast<const char*>(stage.page);
  const int positions = P::kTokens * position_bytes;
  ring.begin(at, P::kBytes + positions);
  if constexpr (P::kParts == 1) {
    ring.copy(at, to, page, P::kBytes + positions);
  } else {
    const int part = stage.meta >> 16;
    ring.copy(at, to, page + part * P::kKBytes, P::kKBytes);
    ring.copy(at, to + P::kKBytes, page + P::kParts * P::kKBytes + part * P::kVBytes, P::kVBytes);
    if constexpr (P::kScaleBytes > 0)
      ring.copy(at, to + P::kKBytes + P::kVBytes,
                page + P::kParts * (P::kKBytes + P::kVBytes) + part * P::kScaleBytes, P::kScaleBytes);
    if (positions) ring.copy(at, to + P::kBytes, page + P::kPageBytes + part * positions, positions);
  }
}

// Two slots a warp; a stage takes one, or both where it is of plain rows and larger than a slot.
template <class In, int kDim, int kPageTokens, int kN, int kWarps, int kResident, int kLimit, class TierList>
__global__ void __launch_bounds__(kWarps * 32, kResident / kWarps) decode(const __grid_constant__ Params p) {
  constexpr int kSlot = slot_bytes<kDim, kPageTokens, kLimit>(TierList{});
  constexpr bool kWidePlain = Part<Tier<16, 16>, kDim, kPageTokens, kLimit>::kBytes + kPageTokens * 4 > kSlot;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ unsigned long long bars[kWarps * 2];
  __shared__ int2 described[kWarps * 2];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, block = blockIdx.y;
  unsigned char* slots = shared + warp * 2 * kSlot;
  int2* what = described + warp * 2;
  Ring<2> ring(bars + warp * 2);
  wait_for_previous();
  release_next();

  for (int worker = blockIdx.x * kWarps + warp; worker < p.workers; worker += gridDim.x * kWarps) {
    const int first = p.starts[worker], end = p.starts[worker + 1];
    if (first >= end) continue;
    Stage next = p.stages[first];
    State<kDim, kN> st;
    int group = -1, at = 0, head = 0, free = 2, ahead = first;  // `ahead`: the stage that `next` is
    for (int i = first; i < end; i++) {
      while (ahead < end) {
        const int takes = kWidePlain && (next.meta >> 8 & 0xff) == 0 ? 2 : 1;
        if (takes > free) break;
        if (takes == 2) head = at = 0;
        if (lane == 0) what[head] = make_int2(next.group, static_cast<int>(next.meta));
        fill<kDim, kPageTokens, kLimit, 0>(TierList{}, ring, head, slots + head * kSlot, next, p.position_bytes);
        ring.commit();
        head ^= takes & 1;
        free -= takes;
        if (++ahead < end) next = p.stages[ahead];
      }
      __syncwarp();
      const int2 now = what[at];
      if (now.x != group) {  // while the page is on its way
        if (group >= 0) end_group(p, st, group, worker, block);
        group = now.x;
        begin_group<In>(p, st, group, block);
      }
      ring.wait(at, ahead - i);
      attend<In, kDim, kPageTokens, kLimit, kN, 0>(TierList{}, p, st, slots + at * kSlot, now.y & 0xff, now.y >> 8 & 0xff);
      __syncwarp();
      const int took = kWidePlain && (now.y >> 8 & 0xff) == 0 ? 2 : 1;
      free += took;
      at ^= took & 1;
    }
    end_group(p, st, group, worker, block);
    __syncwarp();
  }
}
