// decode.cu over packed pages of one format in blocks that an engine owns: every warp cuts its own work out of the lengths
// (packed_work.cuh), and reads the addresses of pages from the block table a few stages ahead.
#include "decode_codes.cuh"
#include "decode_partial.cuh"
#include "decode_query.cuh"
#include "decode_stage.cuh"
#include "packed_work.cuh"
#include "pdl.cuh"

struct PackedParams : Params {
  const unsigned char* pages;
  const int* table;      // [rows, blocks]
  const float* balance;  // [kv heads, D], or null: multiplied with q
  i64 table_row, block_bytes, head_bytes;  // strides; table_row in ints
  unsigned long long by_block_stages;      // for divide()
  int block_stages;                        // stages of a block
  PackedWork work;

  static constexpr bool kBalances = true;
  __device__ __forceinline__ int queries_of(int row) const { return work.queries_of(row); }
  __device__ __forceinline__ const char* query_row(int row) const { return q + work.first_query(row) * q_query; }
};

template <class T, int kDim, int kPageTokens, bool kByPosition>
struct PackedPart : Part<T, kDim, kPageTokens, kByPosition> {
  static constexpr bool kConsecutive = true;
};

// A stage of the walk: `number` is that of the request, from its first token on. Its page's address comes from the table.
template <class P>
__device__ __forceinline__ Stage stage_of(const PackedParams& p, const PackedWalk& walk) {
  const int number = walk.g.row.first + walk.at, block = divide(number, p.by_block_stages);
  const int in_block = number - block * p.block_stages;
  Stage stage;
  const i64 handle = p.table[walk.g.number * p.table_row + block];
  stage.page = reinterpret_cast<unsigned long long>(p.pages) + handle * p.block_bytes + walk.g.head * p.head_bytes +
               in_block / P::kParts * P::kPageBytes;
  stage.group = p.head_caches + walk.g.number * p.kv_heads + walk.g.head;
  stage.meta = meta_of(min(walk.g.row.length - number * P::kTokens, P::kTokens), 1, number);
  return stage;
}

template <class In, bool kOrdered, int kDim, int kPageTokens, int kN, int kWarps, int kResident, class T>
__global__ void __launch_bounds__(kWarps * 32, kResident / kWarps) decode_packed(const __grid_constant__ PackedParams p) {
  using P = PackedPart<T, kDim, kPageTokens, kOrdered>;
  constexpr int kSlot = P::kBytes;
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
    PackedWalk walk(p.work, cut, chunk);
    if (!walk.live) {
      if (spread) return;
      continue;
    }
    const auto produce = [&](int at, const Stage& stage) {
      const Sizes size = {P::kKBytes, P::kVBytes, P::kScaleBytes, P::kParts, P::kTokens};
      Stage in_page = stage;
      in_page.meta = meta_of(0, 1, part_of(stage.meta) % P::kParts);
      fill<false>(ring, at, slots + at * kSlot, in_page, size, 0);
    };
    // Stages of the chunk; one whose group is -1 is past the end.
    const auto take = [&]() {
      Stage stage;
      stage.page = 0, stage.group = -1, stage.meta = 0;
      if (walk.live) {
        stage = stage_of<P>(p, walk);
        walk.next(p.work, cut);
      }
      return stage;
    };
    Stage now = take();
    produce(0, now);
    ring.commit();
    Stage next = take(), after = take();
    State<kDim, kN> st;
    int group = -1;
    for (int at = 0;; at ^= 1) {
      const bool another = now.group != group;
      if (another) {
        if (group >= 0) end_group(p, st, group, chunk - p.head_caches, block);
        if (now.group < 0) break;
        group = now.group;
        load_query(p, st, now, block);
      }
      if (next.group >= 0) produce(at ^ 1, next);
      ring.commit();
      if (next.group >= 0 && next.group != now.group) expect_query<kDim, kN>(p, next, block);
      if (another) begin_group<In, false, kOrdered>(p, st, now, block);  // overlaps the copy of the page
      ring.wait(at, 2);
      attend_codes<T, P, false>(p, st, slots + at * kSlot, tokens_of(now.meta), group, part_of(now.meta) * P::kTokens);
      __syncwarp();
      now = next;
      next = after;
      after = take();
    }
    __syncwarp();
    if (spread) return;
  }
}
