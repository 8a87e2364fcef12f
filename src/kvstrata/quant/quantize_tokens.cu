// K and V rows of a decode step or a short prompt into pages that an engine owns: a warp processes one side and KV head of the
// runs that begin in its window (quantize_runs.cuh).
//
// A window is one token as long as there are enough warps. The row of its first token is requested together with the slots,
// not after them: if it starts a run, as in a decode step, nothing waits for memory twice.
#include "quantize_runs.cuh"

template <class S>
__device__ __forceinline__ void write_window(const S& side, unsigned char* rows, float* begin) {
  using Rows = typename S::Rows;
  unsigned char* zeros = rows + 16 * Rows::Rows::kBytes;
  const int first = blockIdx.x * side.p.window;
  Rows::copy(rows, side.row(first), 0, 0, 1);
  const Window window(*side.slot_address(first), side.p, first, side.p.window);
  Rows::clear(zeros);
  if (!window.starts) return;
  if (!(window.starts & 2)) {  // not needed after all; copies are unordered, and another row will go to its memory
    commit_group();
    wait_group<0>();
    __syncwarp();
  }
  side.write_runs(window, first, 1, rows, zeros, side.centre(begin));
}

// Blocks per multiprocessor, so that the compiler uses at most 80, 128, 168 or 255 registers: as few as hardly spill.
template <class In, int kDim, bool kBalance>
constexpr int kBlocksOfTokens = kDim > 128 ? 8 : sizeof(In) == 4 || kBalance ? 10 : kDim <= 64 ? 20 : 12;

template <class In, int kDim, int kKBits, int kVBits, int kTokens, bool kRotate, bool kBalance, class Slot>
__global__ void __launch_bounds__(32, kBlocksOfTokens<In, kDim, kBalance>) quantize_tokens(const __grid_constant__ Params p) {
  using K = Side<In, kDim, kKBits, kVBits, kTokens, kRotate, kBalance, false, Slot>;
  using V = Side<In, kDim, kKBits, kVBits, kTokens, kRotate, kBalance, true, Slot>;
  extern __shared__ __align__(512) unsigned char shared[];  // of the longest row, for Swizzle
  float* begin = reinterpret_cast<float*>(shared + 17 * K::Rows::Rows::kBytes);
  wait_for_previous();
  release_next();
  const int head = blockIdx.y >> 1;
  if (blockIdx.y & 1) write_window(V{p, head}, shared, nullptr);
  else write_window(K{p, head}, shared, begin);
}
