// K and V rows of any tokens into pages that an engine owns: a warp makes one side and KV head of a run of tokens.
//
// slot = block * block_size + offset. A run is tokens of one call whose slots follow each other within a tile of 16 slots;
// the warp whose window has a run's first token makes all of it. A prompt is runs of 16, a decode step runs of one. What a
// token's codes and scale are depends on its row alone: every run goes through the arithmetic of whole tiles
// (quantize_encode.cuh), with zeros for tokens that are not in it. A whole tile is stored as it is. Else the fields of the
// run's tokens are replaced one by one, since words and bytes have fields of several tokens and other warps may write
// theirs at the same time.
#include "pdl.cuh"
#include "quantize_encode.cuh"
#include "quantize_rows.cuh"

using i64 = long long;

struct Params {
  const char* k;
  const char* v;
  unsigned char* pages;
  const void* slot_mapping;  // Slot [tokens]
  const float* balance;      // [heads, D], or null: K is divided by it
  const float* centre;       // [heads, D], or null: subtracted from balanced K
  i64 k_token, k_head, v_token, v_head;             // strides in bytes
  i64 block_stride, head_stride, slot_stride;       // of pages in bytes, of slot_mapping in elements
  int tokens, slots, block_size, window;            // window: tokens whose runs a warp makes, up to 16
};

// A lane's parts of its two rows, all on their way before the first is used.
template <class In, int kSteps>
struct InRegisters {
  static constexpr bool kByMatrix = false;
  using Raw = typename Quad<In>::type;
  Raw raw[kSteps][2];
  bool there[2];

  __device__ __forceinline__ explicit InRegisters(const InMemory<In>& source) : there{source.there[0], source.there[1]} {
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) raw[s][i] = source.load(s, i);
  }
  __device__ __forceinline__ Raw load(int step, int i) const { return raw[step][i]; }
  template <bool kIsV>
  __device__ __forceinline__ void load_operand(uint2 (&to)[2], int step) const {
    to[0] = raw[step][0];
    to[1] = raw[step][1];
  }
};

// K rows times 1 / balance, less the centre, cleaned and rotated; in float32.
template <class In, int kSteps, bool kRotate>
__device__ __forceinline__ void rotate_balanced(Tile<kSteps>& f, const InRegisters<In, kSteps>& source, const Centre& centre,
                                                const float* balance) {
  unsigned h[2][2];
  rotation_operand<bf16, kRotate>(h);
  const int t = threadIdx.x & 3;
  clear<kSteps>(f);
#pragma unroll
  for (int s = 0; s < kSteps; s++) {
    float x[2][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const auto raw = source.load(s, i);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int dim = 16 * s + 4 * t + e;
        float value = __fmul_rn(quad_value<In>(raw, e), __frcp_rn(__ldg(balance + dim)));
        if (centre.there && source.there[i]) value = __fsub_rn(value, __ldg(centre.plain + dim));
        x[i][e] = clean(value);
      }
    }
    rotate_step_exactly<false>(f[s], x, h);
  }
  rotate_steps<kSteps, kRotate>(f);
}

// A tile with a row that is not fine: rows that are keep what rotate_rows made of them.
template <class In, int kSteps, int kBits, int kTiles, bool kIsV, bool kRotate>
__device__ __noinline__ void write_rarely(InMemory<In> source, Centre centre, unsigned char* to, int tile,
                                          unsigned char* scales, SomeTokens tokens) {
  using G = Group<kIsV>;
  constexpr float kFactor = rotation_factor<kSteps, kRotate>();
  Tile<kSteps> f, cleaned;
  rotate_cleaned<In, kSteps, kIsV, kRotate>(cleaned, source, centre);
  float measure = measure_rows<kBits, kSteps, kIsV>(cleaned);
  if constexpr (sizeof(In) == 2) {
    rotate_rows<In, kSteps, kIsV, kRotate>(f, source, centre);
    const float fast = measure_rows<kBits, kSteps, kIsV>(f);
    const bool fine = is_fine<kBits>(fast, kFactor);
    float keeps[G::kRows];
    G::spread(fine ? 1.f : 0.f, keeps);
    if (fine) measure = fast;
#pragma unroll
    for (int s = 0; s < kSteps; s++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        if (keeps[G::row(i >> 1, i & 1)] != 0.f) cleaned[s][i >> 1][i & 1] = f[s][i >> 1][i & 1];
  }
  write_side<In, kSteps, kBits, kTiles, kIsV, kRotate, false>(cleaned, measure, -1, to, tile, scales, tokens);
}

template <class In, int kSteps, int kBits, int kTiles, bool kIsV, bool kRotate, bool kBalance>
__device__ __forceinline__ void write_run(const InMemory<In>& source, const Centre& centre, const float* balance,
                                          unsigned char* to, int tile, unsigned char* scales, const SomeTokens& tokens) {
  if constexpr (kBalance && !kIsV) {
    Tile<kSteps> f;
    rotate_balanced<In, kSteps, kRotate>(f, InRegisters<In, kSteps>(source), centre, balance);
    const float measure = measure_rows<kBits, kSteps, kIsV>(f);
    write_side<In, kSteps, kBits, kTiles, kIsV, kRotate, false>(f, measure, -1, to, tile, scales, tokens);
  } else {
    if constexpr (sizeof(In) == 2) {
      Tile<kSteps> f;
      rotate_rows<In, kSteps, kIsV, kRotate>(f, InRegisters<In, kSteps>(source), centre);
      const float measure = measure_rows<kBits, kSteps, kIsV>(f);
      if (__all_sync(~0u, is_fine<kBits>(measure, rotation_factor<kSteps, kRotate>()))) {
        write_side<In, kSteps, kBits, kTiles, kIsV, kRotate, true>(f, measure, -1, to, tile, scales, tokens);
        return;
      }
    }
    write_rarely<In, kSteps, kBits, kTiles, kIsV, kRotate>(source, centre, to, tile, scales, tokens);
  }
}

template <class In, int kDim, int kKBits, int kVBits, int kTokens, bool kRotate, bool kBalance, bool kIsV, class Slot>
__device__ __forceinline__ void write_window(const Params& p, int head, float* begin) {
  constexpr int kSteps = kDim / 16, kTiles = kTokens / 16;
  constexpr int kKBytes = code_bytes(kKBits, kSteps * kTiles), kVBytes = code_bytes(kVBits, kSteps * kTiles);
  constexpr int kPageBytes = kKBytes + kVBytes + kTiles * kTileScaleBytes;
  const int lane = threadIdx.x & 31, first = blockIdx.x * p.window, mine = first - 1 + lane;
  i64 slot = -1;  // lane 0: of the token before the window; 15 of those after it
  if (mine >= 0 && mine < p.tokens) slot = static_cast<const Slot*>(p.slot_mapping)[mine * p.slot_stride];
  const int own = slot >= 0 && slot < p.slots ? static_cast<int>(slot) : -1;
  const int before = __shfl_up_sync(~0u, own, 1);
  const bool follows = lane && own >= 0 && own == before + 1 && own % 16;
  const unsigned follow = __ballot_sync(~0u, follows);
  unsigned starts = __ballot_sync(~0u, lane && lane <= p.window && own >= 0 && !follows);
  if (!starts) return;
  const Centre centre{!kIsV && p.centre, p.centre + head * kDim, begin};
  if constexpr (!kIsV) {
    if (centre.there) begin_products<kSteps, kRotate>(begin, centre.plain);
    else begin_with_nothing<kSteps>(begin);
  }
  while (starts) {
    const int start = __ffs(starts) - 1;
    starts &= starts - 1;
    const unsigned after = start < 31 ? follow >> (start + 1) : 0u;
    const int leader = __shfl_sync(~0u, own, start), in_block = leader % p.block_size;
    const SomeTokens tokens{leader % 16, __ffs(~after)};
    InMemory<In> source;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int token = lane / 4 + 8 * i;
      source.there[i] = tokens.has(token);
      const i64 row = first - 1 + start + (source.there[i] ? token - tokens.first : 0);
      source.row[i] = (kIsV ? p.v + row * p.v_token + head * p.v_head : p.k + row * p.k_token + head * p.k_head) +
                      lane % 4 * 4 * sizeof(In);
    }
    unsigned char* page = p.pages + leader / p.block_size * p.block_stride + head * p.head_stride +
                          static_cast<i64>(in_block / kTokens) * kPageBytes;
    write_run<In, kSteps, kIsV ? kVBits : kKBits, kTiles, kIsV, kRotate, kBalance>(
        source, centre, p.balance + head * kDim, page + (kIsV ? kKBytes : 0), in_block % kTokens / 16,
        page + kKBytes + kVBytes, tokens);
  }
}

// Blocks a multiprocessor, so that the compiler keeps to 80, 128, 168 or 255 registers: as few as hardly spill.
template <class In, int kDim, int kKBits, int kVBits, bool kBalance>
constexpr int kBlocksOfTokens = kDim > 128 ? 8 : sizeof(In) == 4 || kBalance ? 10 : kDim <= 64 ? 20 : 12;

template <class In, int kDim, int kKBits, int kVBits, int kTokens, bool kRotate, bool kBalance, class Slot>
__global__ void __launch_bounds__(32, kBlocksOfTokens<In, kDim, kKBits, kVBits, kBalance>)
    quantize_tokens(const __grid_constant__ Params p) {
  __shared__ alignas(16) float begin[2 * kDim];
  wait_for_previous();
  release_next();
  const int head = blockIdx.y >> 1;
  if (blockIdx.y & 1) write_window<In, kDim, kKBits, kVBits, kTokens, kRotate, kBalance, true, Slot>(p, head, nullptr);
  else write_window<In, kDim, kKBits, kVBits, kTokens, kRotate, kBalance, false, Slot>(p, head, begin);
}
