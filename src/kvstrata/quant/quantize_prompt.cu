// K and V rows of long prompts into pages that an engine owns: a warp processes one side and KV head of consecutive windows of
// 16 tokens (quantize_runs.cuh).
//
//   slots of a window --is there a run of 16?--> its rows in shared memory --> codes, stored in wide accesses
//
// As in quantize.cu, a warp loops over tiles: while it processes one, the rows of the next are copied into shared memory, and
// the slots of the window after that. A prompt may begin inside a tile; its windows still have one run of 16 each. Windows with
// other runs (the ends of a prompt, single tokens) are processed run by run, from memory, in separate code.
#include "quantize_runs.cuh"

constexpr int kWindow = 16;

// The runs of a window that is not a whole tile.
template <class S>
__device__ __noinline__ void write_other(const Params& p, int head, int first, unsigned char* rows, unsigned char* zeros,
                                         const float* centre) {
  const S side{p, head};
  side.write_runs(Window(*side.slot_address(first), p, first, kWindow), first, 0, rows, zeros, centre);
}

template <class S, class In, class Slot>
struct Prompt {
  using Stage = InStage<In, S::kSteps>;
  const S& side;

  // A window with one run of 16 tokens; slot < 0: one with other runs.
  struct Whole {
    int slot = -1, first = 0;
  };
  __device__ __forceinline__ Whole whole(const Slot* slots, int n) const {
    const Window window(slots[threadIdx.x & 31], side.p, n * kWindow, kWindow);
    const int start = __ffs(window.starts) - 1;
    if ((window.starts & (window.starts - 1)) || start < 0 || window.count(start) < 16) return {};
    return {window.slot_of(start), n * kWindow - 1 + start};
  }

  __device__ __forceinline__ void ask(Slot* slots, int n) const {
    cp_async_or_zero<sizeof(Slot)>(shared_address(slots + (threadIdx.x & 31)), side.slot_address(n * kWindow), true);
  }

  // Rows of a tile from `token` on; four lanes copy a row.
  __device__ __forceinline__ void copy(unsigned to, int token) const {
    constexpr int kRow = Stage::Rows::kBytes;
    const int first = Stage::row_to_copy(), chunk = threadIdx.x % 4;
    const char* from = side.row(token) + first * side.stride() + chunk * 16;
#pragma unroll
    for (int i = 0; i < 2; i++, from += 8 * side.stride()) {
      unsigned place[2];  // offsets of chunks 0 to 3 and 4 to 7; eight chunks further is 128 bytes further
#pragma unroll
      for (int half = 0; half < 2; half++) place[half] = to + Stage::Rows::offset(first + 8 * i, chunk + 4 * half);
#pragma unroll
      for (int c = 0; c < kRow; c += 64)
        if (c + 64 <= kRow || c + chunk * 16 < kRow)
          cp_async_or_zero<16, true>(place[c / 64 % 2] + c / 128 * 128, from + c, true);
    }
  }

  // Windows n, n + step and so on, before `end`.
  __device__ __forceinline__ void all(unsigned char* shared, int n, int end, int step) const {
    if (n >= end) return;
    unsigned char* zeros = shared + 2 * Stage::kBytes;
    Slot* slots = reinterpret_cast<Slot*>(zeros + Stage::Rows::kBytes);  // of two windows
    S::Rows::clear(zeros);
    const float* centre = side.centre(reinterpret_cast<float*>(slots + 2 * 32));
    ask(slots, n);
    if (n + step < end) ask(slots + 32, n + step);
    commit_group();
    // The rows of the first tile are loaded without waiting for its slots: most likely it begins with its window.
    const bool early = (n + 1) * kWindow <= side.p.tokens;
    if (early) copy(shared_address(shared), n * kWindow);
    commit_group();
    wait_group<1>();
    __syncwarp();
    Whole current = whole(slots, n);
    if (current.slot >= 0 && !(early && current.first == n * kWindow)) {
      wait_group<0>();  // copies are unordered
      __syncwarp();
      copy(shared_address(shared), current.first);
      commit_group();
    }
#pragma unroll 1
    for (int i = 0; n < end; n += step, i++) {
      wait_group<1>();  // the next slots, before the last rows
      __syncwarp();     // also: data of the previous tile may be overwritten
      if (n + 2 * step < end) ask(slots + i % 2 * 32, n + 2 * step);
      commit_group();
      Whole next;
      if (n + step < end) next = whole(slots + (i + 1) % 2 * 32, n + step);
      if (next.slot >= 0) copy(shared_address(shared + (i + 1) % 2 * Stage::kBytes), next.first);
      commit_group();
      wait_group<2>();  // the rows of this tile
      __syncwarp();
      unsigned char* rows = shared + i % 2 * Stage::kBytes;
      if (current.slot >= 0) side.write(Stage{rows, {true, true}}, centre, current.slot, AllTokens{});
      else write_other<S>(side.p, side.head, n * kWindow, rows, zeros, centre);
      current = next;
    }
  }
};

// Blocks a multiprocessor, so that the compiler keeps to 80, 168 or 255 registers. With 128, as in quantize.cu, K4V4 of a prompt
// of 16k tokens takes longer on an H200 (docs/perf-log.md).
template <int kDim, bool kBalance>
constexpr int kBlocksOfPrompt = kDim > 128 ? 8 : kBalance || kDim > 64 ? 12 : 24;

// Block x is head x % heads of windows from x / heads on. K comes first, then V in rounds of which each takes half of what is
// left, so that all warps end at about the same time.
template <class In, int kDim, int kKBits, int kVBits, int kTokens, bool kRotate, bool kBalance, class Slot>
__global__ void __launch_bounds__(32, kBlocksOfPrompt<kDim, kBalance>)
    quantize_prompt(const __grid_constant__ Params p) {
  using K = Side<In, kDim, kKBits, kVBits, kTokens, kRotate, kBalance, false, Slot>;
  using V = Side<In, kDim, kKBits, kVBits, kTokens, kRotate, kBalance, true, Slot>;
  extern __shared__ __align__(512) unsigned char shared[];  // of the longest row, for Swizzle
  wait_for_previous();
  release_next();
  const int head = blockIdx.x % p.heads, n = blockIdx.x / p.heads, step = gridDim.x / p.heads, round = blockIdx.y - 1;
  const int windows = (p.tokens + kWindow - 1) / kWindow, left = (windows + step - 1) / step;
  if (round < 0) {
    const K k{p, head};
    Prompt<K, In, Slot>{k}.all(shared, n, windows, step);
  } else {
    const V v{p, head};
    const int done = left - (left >> round), next = left - (left >> (round + 1));
    Prompt<V, In, Slot>{v}.all(shared, n + step * done, min(windows, step * next), step);
  }
}
