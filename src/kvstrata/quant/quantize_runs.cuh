// K and V rows of any tokens into pages that an engine owns, one run at a time; shared by quantize_tokens.cu and
// quantize_prompt.cu.
//
// slot = block * block_size + offset. A run is tokens of one call with consecutive slots within a tile of 16 slots; the warp
// whose window has a run's first token processes all of it. A prompt consists of runs of 16, a decode step of runs of one. A
// token's codes and scale depend only on its row: every run uses the arithmetic of whole tiles (quantize_encode.cuh), with
// zeros for absent tokens. A whole tile is stored as it is. Otherwise the fields of the run's tokens are replaced one by one,
// since words and bytes have fields of several tokens and other warps may write theirs at the same time.
#pragma once
#include "cp_async.cuh"
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
  int tokens, slots, block_size, heads;
  int window;        // tokens whose runs a warp processes, up to 16
  int shift;         // x / block_size is x * inverse / 2^32 / 2^shift, for any slot
  unsigned inverse;
};

// Slots of a window, one per lane: lane 0 has that of the token before it, and the lanes after the window have those of the 15
// tokens after it.
struct Window {
  int own;          // -1: padding
  unsigned follow;  // lanes whose token continues the run of the one before
  unsigned starts;  // lanes of the window where a run begins

  // `slot`: of the lane's token, any number if there is none; `first` and `tokens`: of the window.
  template <class Slot>
  __device__ __forceinline__ Window(Slot slot, const Params& p, int first, int tokens) {
    const int lane = threadIdx.x & 31;
    own = has_token(p, first) && slot >= 0 && slot < p.slots ? static_cast<int>(slot) : -1;
    const int before = __shfl_up_sync(~0u, own, 1);
    const bool follows = lane && own >= 0 && own == before + 1 && own % 16;
    follow = __ballot_sync(~0u, follows);
    starts = __ballot_sync(~0u, lane && lane <= tokens && own >= 0 && !follows);
  }
  static __device__ __forceinline__ int token(int first) { return first - 1 + static_cast<int>(threadIdx.x & 31); }
  static __device__ __forceinline__ bool has_token(const Params& p, int first) {
    return static_cast<unsigned>(token(first)) < static_cast<unsigned>(p.tokens);
  }
  // The slot of a run's first token, which lane `start` has.
  __device__ __forceinline__ int slot_of(int start) const { return __shfl_sync(~0u, own, start); }
  __device__ __forceinline__ int count(int start) const { return __ffs(~(start < 31 ? follow >> (start + 1) : 0u)); }
};

// A slot's page of one head, and its tile in the page.
template <int kTokens, int kPageBytes>
struct Place {
  unsigned char* page;
  int tile;
  __device__ __forceinline__ Place(const Params& p, int slot, int head) {
    const int block = static_cast<int>(static_cast<unsigned long long>(slot) * p.inverse >> 32) >> p.shift;
    const int in_block = slot - block * p.block_size;
    page = p.pages + block * p.block_stride + head * p.head_stride +
           static_cast<i64>(in_block / kTokens) * kPageBytes;
    tile = in_block % kTokens / 16;
  }
};

// Rows of a run in shared memory, token by token. A row of zeros represents the tokens of the tile that are not in the run.
// Operands are in ldmatrix order, so that a row gives the same sums as in a whole tile (InStage).
template <class In, int kSteps>
struct InRun {
  static constexpr bool kByMatrix = sizeof(In) == 2;
  using Rows = Swizzle<kSteps * sizeof(In)>;
  using Raw = typename Quad<In>::type;
  const unsigned char *rows, *zeros;
  SomeTokens tokens;
  bool there[2];

  __device__ __forceinline__ InRun(const unsigned char* rows, const unsigned char* zeros, const SomeTokens& tokens)
      : rows(rows), zeros(zeros), tokens(tokens) {
    const int g = (threadIdx.x & 31) >> 2;
    there[0] = tokens.has(g);
    there[1] = tokens.has(g + 8);
  }
  __device__ __forceinline__ Raw load(int step, int i) const {
    const int g = (threadIdx.x & 31) >> 2, byte = (16 * step + 4 * (threadIdx.x & 3)) * sizeof(In);
    if (!there[i]) return Raw{};
    return *reinterpret_cast<const Raw*>(rows + Rows::offset(g + 8 * i - tokens.first, byte / 16) + byte % 16);
  }
  template <bool kIsV>
  __device__ __forceinline__ void load_operand(uint2 (&raw)[2], int step) const {
    const unsigned lane = threadIdx.x & 31;
    const unsigned token = kIsV ? ChunksFirst::row(lane) : RowsFirst::row(lane);
    const unsigned chunk = kIsV ? ChunksFirst::chunk(lane) : RowsFirst::chunk(lane);
    const unsigned row = tokens.has(token) ? token - tokens.first : 0;
    const unsigned address = shared_address(tokens.has(token) ? rows : zeros) + Rows::offset(row, chunk);
    unsigned m[4];
    ldmatrix_x4(m, Rows::further(address, row, chunk, step));
    raw[0] = make_uint2(m[0], kIsV ? m[1] : m[2]);
    raw[1] = make_uint2(kIsV ? m[2] : m[1], m[3]);
  }
  // Copies rows `first` to `end` of a run to shared memory; its first token is at `from`, the next `stride` bytes further.
  static __device__ __forceinline__ void copy(unsigned char* rows, const char* from, i64 stride, int first, int end) {
    for (int i = first * Rows::kChunks + static_cast<int>(threadIdx.x & 31); i < end * Rows::kChunks; i += 32) {
      const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
      cp_async_or_zero<16>(shared_address(rows) + Rows::offset(row, chunk), from + row * stride + chunk * 16, true);
    }
  }
  static __device__ __forceinline__ void clear(unsigned char* zeros) {
    for (int i = (threadIdx.x & 31) * 16; i < Rows::kBytes; i += 32 * 16)
      *reinterpret_cast<uint4*>(zeros + i) = make_uint4(0, 0, 0, 0);
  }
};

// A tile with a row that the fast path does not take.
template <class In, int kSteps, int kBits, int kTiles, bool kIsV, bool kRotate, class Source>
__device__ __noinline__ void write_rarely(Source source, const float* centre, unsigned char* to, int tile,
                                          unsigned char* scales, SomeTokens tokens) {
  Tile<kSteps> f;
  transform_any<In, kSteps, kIsV, kRotate, false>(f, source, centre);
  write_side<kSteps, kBits, kTiles, kIsV, kRotate>(f, 0, -1, to, tile, scales, tokens);
}

// One side of the windows of one call.
template <class In, int kDim, int kKBits, int kVBits, int kTokens, bool kRotate, bool kBalance, bool kIsV, class Slot>
struct Side {
  static constexpr bool kIsV_ = kIsV;
  static constexpr int kSteps = kDim / 16, kTiles = kTokens / 16, kBits = kIsV ? kVBits : kKBits;
  static constexpr int kKBytes = code_bytes(kKBits, kSteps * kTiles), kVBytes = code_bytes(kVBits, kSteps * kTiles);
  static constexpr int kPageBytes = kKBytes + kVBytes + kTiles * kTileScaleBytes;
  static constexpr int kCodes = kIsV ? kKBytes : 0, kScales = kKBytes + kVBytes;  // offsets in a page
  static constexpr bool kBalanced = kBalance && !kIsV;
  using Page = Place<kTokens, kPageBytes>;
  using Rows = InRun<In, kSteps>;
  const Params& p;
  int head;

  __device__ __forceinline__ const char* row(i64 token) const {
    return kIsV ? p.v + token * p.v_token + head * p.v_head : p.k + token * p.k_token + head * p.k_head;
  }
  __device__ __forceinline__ i64 stride() const { return kIsV ? p.v_token : p.k_token; }
  // Address of the slot of the lane's token in the window that begins with token `first`; any other if there is none.
  __device__ __forceinline__ const Slot* slot_address(int first) const {
    return static_cast<const Slot*>(p.slot_mapping) + (Window::has_token(p, first) ? Window::token(first) : 0) * p.slot_stride;
  }
  // The centre in shared memory, as the rows of K need it.
  __device__ __forceinline__ const float* centre(float* rotated) const {
    if constexpr (!kIsV) {
      if (p.centre) rotate_centre<kSteps, kRotate>(rotated, p.centre + head * kDim);
      else no_centre<kSteps>(rotated);
    }
    return rotated;
  }

  // Rows in shared memory to codes and scales in the page of their slots, from `slot` on.
  template <class Source, class Tokens>
  __device__ __forceinline__ void write(const Source& source, const float* centre, int slot, const Tokens& tokens) const {
    const Page place(p, slot, head);
    unsigned char *codes = place.page + kCodes, *scales = place.page + kScales;
    if constexpr (kBalanced || sizeof(In) == 4) {
      Tile<kSteps> f;
      transform_any<In, kSteps, kIsV, kRotate, kBalanced>(f, source, centre, p.balance + head * kDim);
      write_side<kSteps, kBits, kTiles, kIsV, kRotate>(f, 0, -1, codes, place.tile, scales, tokens);
    } else {
      Operands<In, kSteps, kIsV, kRotate> operands;
      if (operands.load(source)) {
        Tile<kSteps> f;
        operands.transform(f, source, centre);
        write_side<kSteps, kBits, kTiles, kIsV, kRotate>(f, operands.own_exponent(), -1, codes, place.tile, scales, tokens);
        return;
      }
      SomeTokens some{0, 16};
      if constexpr (!Tokens::kAll) some = tokens;
      write_rarely<In, kSteps, kBits, kTiles, kIsV, kRotate>(source, centre, codes, place.tile, scales, some);
    }
  }

  // The runs that begin in a window, one after the other. `copied`: rows of the first run that are already in flight.
  __device__ __forceinline__ void write_runs(const Window& window, int first, int copied, unsigned char* rows,
                                             unsigned char* zeros, const float* centre) const {
    for (unsigned starts = window.starts; starts; starts &= starts - 1) {
      const int start = __ffs(starts) - 1, slot = window.slot_of(start);
      const SomeTokens tokens{slot % 16, window.count(start)};
      Rows::copy(rows, row(first - 1 + start), stride(), start == 1 ? copied : 0, tokens.count);
      commit_group();
      wait_group<0>();
      __syncwarp();
      write(Rows(rows, zeros, tokens), centre, slot, tokens);
      __syncwarp();  // the next run's rows go to the same memory
    }
  }
};
