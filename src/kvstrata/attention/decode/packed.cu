// decode.cu over packed pages of one format in blocks that an engine owns: every warp cuts its own work out of the lengths
// (packed_work.cuh), and reads the addresses of pages from the block table a few stages ahead.
#include "decode_codes.cuh"
#include "decode_partial.cuh"
#include "decode_query.cuh"
#include "decode_stage.cuh"
#include "packed_work.cuh"
#include "pdl.cuh"

template <bool kPlain>
struct PackedParams : Params {
  const unsigned char* pages;
  const int* table;      // [rows, blocks]
  const float* balance;  // [kv heads, D], or null: multiplied with q
  const char *tail_k, *tail_v, *sink_k, *sink_v;  // [slots, kv heads, tokens, D]; strides below
  i64 tail_request, tail_head, sink_request, sink_head;
  i64 table_row, block_bytes, head_bytes;  // strides; table_row in ints
  unsigned long long by_block_stages;      // for divide()
  int block_stages;                        // stages of a block
  int tail_tokens;                         // rows of a tail: position p is row p % tail_tokens
  PackedWork<kPlain> work;

  static constexpr Balance kBalance = kFactors;
  static constexpr bool kRagged = true;
  __device__ __forceinline__ int queries_of(int row) const { return work.queries_of(row); }
  __device__ __forceinline__ const char* query_row(int row) const { return q + work.first_query(row) * q_query; }
};

template <class T, int kDim, int kPageTokens, bool kByPosition, bool kPlain>
struct PackedPart : Part<T, kDim, kPageTokens, kByPosition> {
  static constexpr bool kConsecutive = true, kSkips = kPlain;
};

constexpr unsigned kOfSinks = kSpokenFor;  // of a stage of plain rows: sink rows, else of the tail

// A stage of sink or tail rows, number `i` of the bucket's.
template <int kDim, class Params, class Walk>
__device__ __forceinline__ Stage plain_stage_of(const Params& p, const Walk& walk, int i) {
  constexpr int kRow = 2 * kDim;
  const auto& row = walk.g.row;
  const int sink_stages = row.sink_stages(), position = i < sink_stages ? 16 * i : row.packed + 16 * (i - sink_stages);
  Stage stage;
  stage.bucket = walk.g.number * p.kv_heads + walk.g.head;
  if (i < sink_stages) {
    stage.page = reinterpret_cast<unsigned long long>(p.sink_k) + p.work.sink_slot(walk.g.number) * p.sink_request +
                 walk.g.head * p.sink_head + position * kRow;
    stage.meta = meta_of(min(row.sinks - position, 16), 0, position / 16) | kOfSinks;
  } else {
    stage.page = reinterpret_cast<unsigned long long>(p.tail_k) + p.work.tail_slot(walk.g.number) * p.tail_request +
                 walk.g.head * p.tail_head + position % p.tail_tokens * kRow;
    stage.meta = meta_of(min(row.length - position, 16), 0, position / 16);
  }
  return stage;
}

// A stage of the walk: `number` is that of the request, from its first token on. Its page's address comes from the table.
template <class P, int kDim, bool kPlain, class Walk>
__device__ __forceinline__ Stage stage_of(const PackedParams<kPlain>& p, const Walk& walk) {
  if constexpr (kPlain)
    if (walk.at >= walk.g.row.codes) return plain_stage_of<kDim>(p, walk, walk.at - walk.g.row.codes);
  const int number = walk.g.row.first + walk.at, block = divide(number, p.by_block_stages);
  const int in_block = number - block * p.block_stages;
  Stage stage;
  const i64 handle = p.table[walk.g.number * p.table_row + block];
  stage.page = reinterpret_cast<unsigned long long>(p.pages) + handle * p.block_bytes + walk.g.head * p.head_bytes +
               in_block / P::kParts * P::kPageBytes;
  stage.bucket = p.head_caches + walk.g.number * p.kv_heads + walk.g.head;
  const int end = kPlain ? walk.g.row.packed : walk.g.row.length;
  stage.meta = meta_of(min(end - number * P::kTokens, P::kTokens), 1, number);
  return stage;
}

template <class In, bool kOrdered, int kDim, int kPageTokens, int kN, int kWarps, int kResident, class T, bool kPlain>
__global__ void __launch_bounds__(kWarps * 32, kResident / kWarps)
    decode_packed(const __grid_constant__ PackedParams<kPlain> p) {
  using P = PackedPart<T, kDim, kPageTokens, kOrdered, kPlain>;
  using Rows = Part<Tier<16, 16>, kDim, kPlainTokens, kOrdered>;
  constexpr int kSlot = kPlain && Rows::kBytes > P::kBytes ? Rows::kBytes : P::kBytes;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ unsigned long long bars[kWarps * 2];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), block = blockIdx.y;
  unsigned char* slots = shared + warp * 2 * kSlot;
  Ring<2> ring(bars + warp * 2);
  wait_for_previous();
  release_next();

  const PackedCut cut(p.work, block * 8 * kN);
  // Blocks i, i + multiprocessors, .. share a multiprocessor; they take neighbouring chunks, all multiprocessors as many.
  const int wave = divide(blockIdx.x, p.by_multiprocessors), resident = divide(gridDim.x, p.by_multiprocessors);
  const int number = (blockIdx.x - wave * p.multiprocessors) * resident + wave, worker = number * kWarps + warp;
  const int each = (cut.used + p.multiprocessors - 1) / p.multiprocessors, in_turn = worker % p.work.workers;
  const bool spread = !cut.split && each < p.work.workers;
  if (spread && in_turn >= each) return;
  const int first = spread ? worker / p.work.workers * each + in_turn : worker;
  for (int chunk = first; chunk < cut.used; chunk += gridDim.x * kWarps) {
    PackedWalk<PackedWork<kPlain>> walk(p.work, cut, chunk);
    if (!walk.live) {
      if (spread) return;
      continue;
    }
    const auto produce = [&](int at, const Stage& stage) {
      if constexpr (kPlain)
        if (!tier_of(stage.meta)) {
          if (!ring.mine()) return;
          const int bytes = tokens_of(stage.meta) * kDim * 2;
          const char* rows = reinterpret_cast<const char*>(stage.page);
          ring.begin(at, 2 * bytes);
          ring.copy(at, slots + at * kSlot, rows, bytes);
          rows += stage.meta & kOfSinks ? p.sink_v - p.sink_k : p.tail_v - p.tail_k;
          ring.copy(at, slots + at * kSlot + Rows::kKBytes, rows, bytes);
          return;
        }
      const Sizes size = {P::kKBytes, P::kVBytes, P::kScaleBytes, P::kParts, P::kTokens};
      Stage in_page = stage;
      in_page.meta = meta_of(0, 1, part_of(stage.meta) % P::kParts);
      fill<false>(ring, at, slots + at * kSlot, in_page, size, 0);
    };
    // Stages of the chunk; one whose bucket is -1 is past the end.
    const auto take = [&]() {
      Stage stage;
      stage.page = 0, stage.bucket = -1, stage.meta = 0;
      if (walk.live) {
        stage = stage_of<P, kDim>(p, walk);
        walk.next(p.work, cut);
      }
      return stage;
    };
    Stage now = take();
    produce(0, now);
    ring.commit();
    Stage next = take(), after = take();
    State<kDim, kN> st;
    int bucket = -1;
    for (int at = 0;; at ^= 1) {
      const bool another = now.bucket != bucket;
      if (another) {
        if (bucket >= 0) {
          int before = chunk - p.head_caches;  // of the bucket's number, in the number of the partial
          if constexpr (kPlain) before = bucket < p.head_caches ? chunk + bucket + 1 : before + bucket - p.head_caches;
          end_bucket(p, st, bucket, before, block);
        }
        if (now.bucket < 0) break;
        bucket = now.bucket;
        load_query(p, st, now, block);
      }
      if (next.bucket >= 0) produce(at ^ 1, next);
      ring.commit();
      if (next.bucket >= 0 && next.bucket != now.bucket) expect_query<kDim, kN>(p, next, block);
      if (another) {
        begin_bucket<In, false, false, kOrdered>(p, st, now, block);  // overlaps the copy of the page
        if constexpr (kPlain) st.skip = p.work.row(Owner(p, now).row, 0).sinks;
      }
      ring.wait(at, 2);
      bool plain = false;
      if constexpr (kPlain) plain = !tier_of(now.meta);
      unsigned char* stage = slots + at * kSlot;
      const int tokens = tokens_of(now.meta), number = part_of(now.meta);
      if (plain) attend_rows<In, Rows, false, false>(p, st, stage, tokens, bucket, number * 16);
      else attend_codes<T, P, false, false>(p, st, stage, tokens, bucket, number * P::kTokens);
      __syncwarp();
      now = next;
      next = after;
      after = take();
    }
    __syncwarp();
    if (spread) return;
  }
}
