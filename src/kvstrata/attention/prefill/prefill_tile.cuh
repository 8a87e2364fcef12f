// Contract between host and kernel: parameters, sizes of a tile, order of the work.
#pragma once
#include "swizzle.cuh"

using i64 = long long;

struct alignas(8) Strides {  // in bytes
  i64 batch, head;
  unsigned token;
};

// n / by for 0 <= n < 2^31, as a multiplication.
struct Divisor {
  unsigned by, factor, shift;
  __device__ __forceinline__ int of(int n) const {
    return static_cast<int>((__umulhi(static_cast<unsigned>(n), factor) + static_cast<unsigned>(n)) >> shift);
  }
  __device__ __forceinline__ int rest(int n, int quotient) const { return n - quotient * static_cast<int>(by); }
};

struct Params {
  const char *q, *k, *v;
  char *out, *lse;         // lse: or null
  const float* sinks;      // [heads], or null
  const int *cu_q, *cu_k;  // [sequences + 1]; null: every sequence has q_len and k_len
  unsigned* check;         // 4 counters of the checking build
  Strides q_by, k_by, v_by, out_by, lse_by;
  Divisor per_section, section, heads, group;  // items and heads of a section; `head` counts over all sequences
  int unused;  // aligns the pairs of numbers below, which are loaded together
  int m_blocks, q_len, k_len, causal, window;  // window 0: none
  float scale_log2, softcap_log2;                     // in log2 units; softcap_log2 0: none
};

// A block takes kBlockM queries of one query head. Its warps form a grid of kRowWarps by kKvWarps. A row warp owns 16
// queries or a multiple, and all keys of its tile. KV warp w takes every kKvWarps-th tile of kBlockN keys, in a ring of
// kStages of its own; the partials of the KV warps are combined at the end.
//
//   shared memory:  Q (later: out) | KV warp 0: stages of K, V | KV warp 1 .. | stats of KV warps 1 .. | scores
template <int kDim_, int kBlockM_, int kBlockN_, int kWarps_, int kKvWarps_, int kStages_, int kResident_>
struct Tile {
  static constexpr int kDim = kDim_, kM = kBlockM_, kN = kBlockN_, kWarps = kWarps_, kKvWarps = kKvWarps_;
  static constexpr int kStages = kStages_, kResident = kResident_;  // kResident: blocks per multiprocessor
  static constexpr int kThreads = kWarps * 32, kRowWarps = kWarps / kKvWarps, kRingThreads = kRowWarps * 32;
  static constexpr int kRows = kM / kRowWarps, kRowTiles = kRows / 16;  // of a warp
  static constexpr int kSteps = kDim / 16, kDimTiles = kDim / 8, kKeyTiles = kN / 8;
  static constexpr bool kKeepQuery = kDim * kRowTiles <= 128;  // in registers
  using Layout = Swizzle<kDim / 8>;
  static constexpr int kQueryBytes = kM * Layout::kBytes, kHalfStage = kN * Layout::kBytes;
  static constexpr int kRingBytes = kStages * 2 * kHalfStage;
  static constexpr int kStatsAt = kQueryBytes + kKvWarps * kRingBytes;
  static constexpr int kScoresAt = kStatsAt + (kKvWarps - 1) * kM * 8, kScoreRow = (kN + 8) * 4;
  static_assert(kWarps % kKvWarps == 0 && kM % (16 * kRowWarps) == 0 && kN % 16 == 0 && kDim % 16 == 0, "odd tile");
  static_assert(kKvWarps == 1 || kM <= kStages * kN, "the output of a KV warp has to fit its ring");
  static_assert(tile_bank_ways<Layout>() == 1, "bank conflicts");
};

// Queries row .. row + rows - 1 of a head, and the keys begin .. end - 1 that at least one of them sees.
struct Item {
  int batch, head, kv_head, q_start, k_start;  // of the sequence
  int row, rows, k_len, shift;                 // query i stands at position i + shift
  int begin, end;
};

__device__ __forceinline__ const char* at(const char* base, const Strides& by, int batch, int head, int token) {
  return base + batch * by.batch + head * by.head + static_cast<i64>(token) * by.token;
}

// Item of a block. Query heads are processed in sections whose keys fit L2; within a section the last queries come first, as they
// see the most keys.
template <class T>
__device__ __forceinline__ Item item_of(const Params& p, int block) {
  const int section = p.per_section.of(block), in_section = p.per_section.rest(block, section);
  const int turn = p.section.of(in_section), head = section * p.section.by + p.section.rest(in_section, turn);
  const int sequence = p.heads.of(head);
  int q_len = p.q_len;
  Item x;
  x.batch = sequence;
  x.head = p.heads.rest(head, sequence);
  x.kv_head = p.group.of(x.head);
  x.q_start = x.k_start = 0;
  x.k_len = p.k_len;
  if (p.cu_q) {
    x.batch = 0;
    x.q_start = p.cu_q[sequence];
    x.k_start = p.cu_k[sequence];
    q_len = p.cu_q[sequence + 1] - x.q_start;
    x.k_len = p.cu_k[sequence + 1] - x.k_start;
  }
  x.row = (p.m_blocks - 1 - turn) * T::kM;
  x.rows = min(T::kM, q_len - x.row);
  x.shift = x.k_len - q_len;
  x.end = p.causal ? min(x.k_len, x.row + x.rows + x.shift) : x.k_len;
  x.begin = p.window ? max(0, x.row + x.shift - p.window + 1) : 0;
  return x;
}
