// Writes K and V rows into their blocks, both in one launch.
//
//   source   K [tokens, heads, dim]          V [tokens, heads, dim]          any token and head stride
//   cache    page = slot / kPageSize, row = slot % kPageSize, strides as given: NHD, HND and flat are one case
//
// A row of one head is divided into vectors: as many elements as one thread moves at a time (16 bytes if alignment
// allows). All vectors of a side are numbered (token, head, vector); a block takes kThreads * kPer consecutive ones of K
// and the same range of V, so rows of any width keep every thread busy, and heads run in parallel within a block.
// Slots outside the cache, negative ones included, are skipped.
//
// Three ways to move a vector, with the same address arithmetic:
//   store_direct   registers; slot, K and V loads are all issued before the first store
//   store_staged   cp.async into shared memory, double buffered over a persistent loop
//   store_bulk     sm_90 bulk copies of whole rows through shared memory, no registers (same dtype only)
#include "cp_async.cuh"
#include "fp8.cuh"
#include "pdl.cuh"
#include "vec.cuh"

using i64 = long long;
using u64 = unsigned long long;

struct Pointers {
  const char* source;
  char* cache;
  const float* scale;  // one value or one per head; null is 1
};

struct Strides {  // in bytes
  i64 source_token, source_head;
  i64 cache_page, cache_row, cache_head;
};

// Fields that change from call to call come first, so that the host rewrites one run of bytes.
struct Params {
  Pointers k, v;
  const void* slot_mapping;
  Strides k_strides, v_strides;
  i64 slot_stride, slots_in_cache;
  int tokens;
};

struct Side : Pointers, Strides {
  __device__ __forceinline__ Side(const Pointers& pointers, const Strides& strides)
      : Pointers(pointers), Strides(strides) {}
};

// Conversion of a vector: none, or rounding to fp8.
template <int kVectorBytes>
struct Copy {
  static constexpr int kIn = kVectorBytes, kOut = kVectorBytes;
  static __device__ __forceinline__ Vec<kOut> apply(const Vec<kIn>& x, float) { return x; }
};

template <class In, class Out, int kElements>
struct Round {
  static constexpr int kIn = kElements * sizeof(In), kOut = kElements;
  static __device__ __forceinline__ Vec<kOut> apply(const Vec<kIn>& x, float inverse_scale) {
    const auto value = [&](int i) { return element<In>(x, i) * inverse_scale; };
    Vec<kOut> out;
    if constexpr (kOut == 1) {
      out.words[0] = to_fp8x2<Out>(value(0), 0.f) & 0xffu;
    } else if constexpr (kOut == 2) {
      out.words[0] = to_fp8x2<Out>(value(0), value(1));
    } else {
#pragma unroll
      for (int i = 0; i < kOut / 4; i++)
        out.words[i] = to_fp8x2<Out>(value(4 * i), value(4 * i + 1)) |
                       static_cast<unsigned>(to_fp8x2<Out>(value(4 * i + 2), value(4 * i + 3))) << 16;
    }
    return out;
  }
};

template <int kHeads, int kVectors, class Index>
struct Place {
  int token, head, vector;
  __device__ __forceinline__ explicit Place(Index n) {
    token = static_cast<int>(n / (kHeads * kVectors));
    const int in_row = static_cast<int>(n - static_cast<Index>(token) * (kHeads * kVectors));
    head = in_row / kVectors;
    vector = in_row % kVectors;
  }
};

// Units of one side in the whole call.
template <int kHeads, int kVectors, class Index>
__device__ __forceinline__ Index vectors_of(const Params& p) {
  return static_cast<Index>(p.tokens) * (kHeads * kVectors);
}

// A plain load: it stays behind wait_for_previous(), which a read-only load would not guarantee.
template <class Slot>
__device__ __forceinline__ i64 slot_of(const Params& p, int token) {
  return static_cast<const Slot*>(p.slot_mapping)[token * p.slot_stride];
}

template <int kPageSize>
__device__ __forceinline__ char* row_in_cache(const Side& side, i64 slot, int head) {
  const i64 page = slot / kPageSize;
  return side.cache + page * side.cache_page + (slot - page * kPageSize) * side.cache_row + head * side.cache_head;
}

template <bool kScalePerHead>
__device__ __forceinline__ float inverse_scale(const Side& side, int head) {
  return side.scale ? __fdiv_rn(1.f, __ldg(side.scale + (kScalePerHead ? head : 0))) : 1.f;
}

// One side's share of a thread: kPer vectors, kept in registers between load() and flush().
template <class Op, int kHeads, int kVectors, int kPageSize, class Slot, class Index, bool kScalePerHead, int kThreads,
          int kPer>
struct Lane {
  Vec<Op::kIn> data[kPer];
  i64 slot[kPer];

  __device__ __forceinline__ void load(const Params& p, const Side& side, Index first) {
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      const Index n = first + i * kThreads;
      slot[i] = -1;
      if (n < vectors_of<kHeads, kVectors, Index>(p)) {
        const Place<kHeads, kVectors, Index> at(n);
        slot[i] = slot_of<Slot>(p, at.token);
        data[i] = load_once<Op::kIn>(side.source + at.token * side.source_token + at.head * side.source_head +
                                     at.vector * Op::kIn);
      }
    }
  }

  __device__ __forceinline__ void flush(const Params& p, const Side& side, Index first) const {
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      const Place<kHeads, kVectors, Index> at(first + i * kThreads);
      if (static_cast<u64>(slot[i]) < static_cast<u64>(p.slots_in_cache))
        store(row_in_cache<kPageSize>(side, slot[i], at.head) + at.vector * Op::kOut,
              Op::apply(data[i], inverse_scale<kScalePerHead>(side, at.head)));
    }
  }
};

template <class Op, int kHeads, int kKVectors, int kVVectors, int kPageSize, class Slot, class Index, bool kScalePerHead,
          int kThreads, int kPer>
__global__ void __launch_bounds__(kThreads) store_direct(const __grid_constant__ Params p) {
  wait_for_previous();
  const Index first = static_cast<Index>(blockIdx.x) * (kThreads * kPer) + threadIdx.x;
  Lane<Op, kHeads, kKVectors, kPageSize, Slot, Index, kScalePerHead, kThreads, kPer> k;
  const Side k_side(p.k, p.k_strides), v_side(p.v, p.v_strides);
  k.load(p, k_side, first);
  if constexpr (kVVectors > 0) {
    Lane<Op, kHeads, kVVectors, kPageSize, Slot, Index, kScalePerHead, kThreads, kPer> v;
    v.load(p, v_side, first);
    k.flush(p, k_side, first);
    v.flush(p, v_side, first);
  } else {
    k.flush(p, k_side, first);
  }
  release_next();
}

// One side's share of a thread in shared memory. A thread only reads back what it copied itself, so waiting for its
// own groups is enough and there is no barrier.
template <class Op, int kHeads, int kVectors, int kPageSize, class Slot, class Index, bool kScalePerHead, int kThreads,
          int kPer>
struct StagedLane {
  Vec<Op::kIn>* stage;  // [2][kPer][kThreads]
  i64 slot[2][kPer];

  __device__ __forceinline__ Vec<Op::kIn>* cell(int buffer, int i) const {
    return stage + (buffer * kPer + i) * kThreads + threadIdx.x;
  }

  __device__ __forceinline__ void load(const Params& p, const Side& side, Index first, int buffer) {
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      const Index n = first + i * kThreads;
      slot[buffer][i] = -1;
      if (n < vectors_of<kHeads, kVectors, Index>(p)) {
        const Place<kHeads, kVectors, Index> at(n);
        slot[buffer][i] = slot_of<Slot>(p, at.token);
        cp_async<Op::kIn>(cell(buffer, i), side.source + at.token * side.source_token + at.head * side.source_head +
                                               at.vector * Op::kIn);
      }
    }
  }

  __device__ __forceinline__ void flush(const Params& p, const Side& side, Index first, int buffer) const {
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      const Place<kHeads, kVectors, Index> at(first + i * kThreads);
      if (static_cast<u64>(slot[buffer][i]) < static_cast<u64>(p.slots_in_cache))
        store(row_in_cache<kPageSize>(side, slot[buffer][i], at.head) + at.vector * Op::kOut,
              Op::apply(*cell(buffer, i), inverse_scale<kScalePerHead>(side, at.head)));
    }
  }
};

template <class Op, int kHeads, int kKVectors, int kVVectors, int kPageSize, class Slot, class Index, bool kScalePerHead,
          int kThreads, int kPer>
__global__ void __launch_bounds__(kThreads) store_staged(const __grid_constant__ Params p) {
  constexpr int kSides = kVVectors > 0 ? 2 : 1, kCells = 2 * kPer * kThreads;
  __shared__ Vec<Op::kIn> stage[kSides * kCells];
  wait_for_previous();
  const Index tile = kThreads * kPer, step = tile * gridDim.x;
  const Index vectors = vectors_of<kHeads, (kKVectors > kVVectors ? kKVectors : kVVectors), Index>(p);
  StagedLane<Op, kHeads, kKVectors, kPageSize, Slot, Index, kScalePerHead, kThreads, kPer> k{stage};
  StagedLane<Op, kHeads, kSides == 2 ? kVVectors : 1, kPageSize, Slot, Index, kScalePerHead, kThreads, kPer> v{
      stage + (kSides - 1) * kCells};

  const Side k_side(p.k, p.k_strides), v_side(p.v, p.v_strides);
  auto load = [&](Index first, int buffer) {
    k.load(p, k_side, first, buffer);
    if constexpr (kSides == 2) v.load(p, v_side, first, buffer);
    commit_group();
  };
  auto flush = [&](Index first, int buffer) {
    k.flush(p, k_side, first, buffer);
    if constexpr (kSides == 2) v.flush(p, v_side, first, buffer);
  };

  // `buffer` is a constant in each half of the loop, so that slots stay in registers.
  Index first = static_cast<Index>(blockIdx.x) * tile + threadIdx.x;
  load(first, 0);
  while (first - threadIdx.x < vectors) {
    load(first + step, 1);
    wait_group<1>();
    flush(first, 0);
    first += step;
    if (first - threadIdx.x >= vectors) break;
    load(first + step, 0);
    wait_group<1>();
    flush(first, 1);
    first += step;
  }
  wait_group<0>();
  release_next();
}

// Rows as bulk copies: thread i of a block moves row i, so a block has kRows rows in flight and spends a dozen
// instructions on each. A row is one head of one token, or a whole token if heads are contiguous. The first half of the
// grid moves K, the second V: memory then sees one stream of reads and one region of writes at a time.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bulk_load(void* shared, const void* global, int bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

template <int kHeads, int kBytes, int kPageSize, class Slot, int kRows>
__device__ __forceinline__ void bulk_rows(const Params& p, const Side& side, unsigned block, char* stage, unsigned barrier) {
  const int lane = threadIdx.x;
  const u64 n = static_cast<u64>(block) * kRows + lane;
  const int token = static_cast<int>(n / kHeads), head = static_cast<int>(n % kHeads);
  if (lane >= kRows || token >= p.tokens) return;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(kBytes) : "memory");
  bulk_load(stage, side.source + token * side.source_token + head * side.source_head, kBytes, barrier);
  const i64 slot = slot_of<Slot>(p, token);
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],0;\nselp.u32 %0,1,0,p;\n}"
        : "=r"(done)
        : "r"(barrier)
        : "memory");
  if (static_cast<u64>(slot) < static_cast<u64>(p.slots_in_cache)) {
    bulk_store(row_in_cache<kPageSize>(side, slot, head), stage, kBytes);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // the stage may go once it was read
  }
}
#endif

template <int kHeads, int kKBytes, int kVBytes, int kPageSize, class Slot, int kRows>
__global__ void __launch_bounds__(32) store_bulk(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
  static_assert(kRows <= 32, "a row is one thread's");
  __shared__ alignas(128) char stage[kRows][kKBytes > kVBytes ? kKBytes : kVBytes];
  __shared__ alignas(8) u64 barriers[kRows];
  wait_for_previous();
  const int lane = threadIdx.x % kRows;
  const unsigned barrier = shared_address(&barriers[lane]);
  if (threadIdx.x < kRows) asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(barrier) : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  const unsigned k_blocks = kVBytes > 0 ? gridDim.x / 2 : gridDim.x;
  if (blockIdx.x < k_blocks)
    bulk_rows<kHeads, kKBytes, kPageSize, Slot, kRows>(p, Side(p.k, p.k_strides), blockIdx.x, stage[lane], barrier);
  else if constexpr (kVBytes > 0)
    bulk_rows<kHeads, kVBytes, kPageSize, Slot, kRows>(p, Side(p.v, p.v_strides), blockIdx.x - k_blocks, stage[lane],
                                                       barrier);
  release_next();
#endif
}
