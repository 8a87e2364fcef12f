// decode.cu over packed pages of one format in blocks that an engine owns: every warp computes its own work from the lengths
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
  const float* balance;  // [kv heads, D], or null: q is multiplied by it
  const char *tail_k, *tail_v, *sink_k, *sink_v;  // [slots, kv heads, tokens, D]; strides below
  i64 tail_request, tail_head, sink_request, sink_head;
  i64 table_row, block_bytes, head_bytes;  // strides; table_row in ints
  unsigned long long by_block_stages, by_head_caches;  // for divide()
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

// A stage whose page is in block `handle`: `page` is its address relative to the first block.
struct PackedStage : Stage {
  int handle;
};

constexpr unsigned kOfSinks = kSpokenFor;  // of a stage of plain rows: sink rows, else of the tail

// A stage of sink or tail rows, number `i` of the bucket's.
template <int kDim, class Params, class Row>
__device__ __forceinline__ PackedStage plain_stage_of(const Params& p, const Row& row, int number, int head, int i) {
  constexpr int kRow = 2 * kDim;
  const int sink_stages = row.sink_stages(), position = i < sink_stages ? 16 * i : row.packed + 16 * (i - sink_stages);
  PackedStage stage;
  stage.handle = 0;
  stage.bucket = number * p.kv_heads + head;
  if (i < sink_stages) {
    stage.page = reinterpret_cast<unsigned long long>(p.sink_k) + p.work.sink_slot(number) * p.sink_request +
                 head * p.sink_head + position * kRow;
    stage.meta = meta_of(min(row.sinks - position, 16), 0, position / 16) | kOfSinks;
  } else {
    stage.page = reinterpret_cast<unsigned long long>(p.tail_k) + p.work.tail_slot(number) * p.tail_request +
                 head * p.tail_head + position % p.tail_tokens * kRow;
    stage.meta = meta_of(min(row.length - position, 16), 0, position / 16);
  }
  return stage;
}

// A stage of the loop: `number` is its index in the request, from its first token on. Its block comes from the table, unless
// `handle` is known.
template <class P, int kDim, bool kPlain, class Walk, class Place>
__device__ __forceinline__ PackedStage stage_of(const PackedParams<kPlain>& p, const Walk& walk, const Place& place,
                                                bool known, int handle) {
  const int row_number = divide(walk.head_cache, p.by_kv_heads), head = walk.head_cache - row_number * p.kv_heads;
  const int number = walk.at;
  int end = walk.length;
  if constexpr (kPlain) {
    const int plain = number - place.row.first - place.row.codes;
    if (plain >= 0) return plain_stage_of<kDim>(p, place.row, row_number, head, plain);
    end = place.row.packed;
  }
  const int block = divide(number, p.by_block_stages), in_block = number - block * p.block_stages;
  PackedStage stage;
  stage.handle = known ? handle : p.table[row_number * p.table_row + block];
  stage.page = reinterpret_cast<unsigned long long>(p.pages) + head * p.head_bytes + in_block / P::kParts * P::kPageBytes;
  stage.bucket = p.head_caches + walk.head_cache;
  stage.meta = meta_of(min(end - number * P::kTokens, P::kTokens), 1, number);
  return stage;
}

// The block's partial in an even batch, from those of its warps in shared memory: `outs` [columns, D] every `pitch` floats.
template <int kDim, int kColumns, int kWarps>
__device__ __forceinline__ void merge_warps(const Params& p, const float2 (*sums)[kColumns], const float* outs, int pitch,
                                            int columns, i64 slot) {
  const int lane = threadIdx.x & 31;
  for (int column = threadIdx.x >> 5; column < min(columns, kColumns); column += kWarps) {
    float2 part[kWarps];
    float top = -3.4e38f, sum = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      part[w] = sums[w][column];
      if (part[w].y != 0.f) top = fmaxf(top, part[w].x);  // 0: the warp saw no token
    }
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      part[w].x = part[w].y != 0.f ? exp2f(part[w].x - top) : 0.f;
      sum += part[w].x * part[w].y;
    }
    const i64 to = slot * kColumns + column;
    if (lane == 0) p.partial_sum[to] = make_float2(top, sum);
#pragma unroll
    for (int d = 4 * lane; d < kDim; d += 128) {
      float4 out = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        if (part[w].y == 0.f) continue;  // its memory may hold anything
        const float4 x = *reinterpret_cast<const float4*>(outs + w * pitch + column * kDim + d);
        out.x += part[w].x * x.x, out.y += part[w].x * x.y, out.z += part[w].x * x.z, out.w += part[w].x * x.w;
      }
      *reinterpret_cast<float4*>(p.partial_out + to * kDim + d) = out;
    }
  }
}

template <class In, bool kOrdered, int kDim, int kPageTokens, int kN, int kWarps, int kResident, class T, bool kPlain>
__global__ void __launch_bounds__(kWarps * 32, kResident / kWarps)
    decode_packed(const __grid_constant__ PackedParams<kPlain> p) {
  using P = PackedPart<T, kDim, kPageTokens, kOrdered, kPlain>;
  using Rows = Part<Tier<16, 16>, kDim, kPlainTokens, kOrdered>;
  constexpr int kColumns = 8 * kN, kOutBytes = kColumns * kDim * 4;
  constexpr int kSlot = kPlain && Rows::kBytes > P::kBytes ? Rows::kBytes : P::kBytes;
  constexpr int kOfWarp = !kPlain && kOutBytes > 2 * kSlot ? kOutBytes : 2 * kSlot;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ unsigned long long bars[kWarps * 2];
  __shared__ float2 sums[kPlain ? 1 : kWarps][kColumns];
  __shared__ PackedPlace<PackedWork<kPlain>> places[kWarps];
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), block = blockIdx.y;
  unsigned char* slots = shared + warp * kOfWarp;
  Ring<2> ring(bars + warp * 2);
  wait_for_previous();
  release_next();

  // Position of this warp if the batch is even.
  const int turn = divide(blockIdx.x, p.by_head_caches), head_cache = blockIdx.x - turn * p.head_caches;
  const int row_number = divide(head_cache, p.by_kv_heads), first = turn * kWarps + warp;
  PackedStage now, next, after;
  after.handle = 0;
  if constexpr (!kPlain)
    if (turn < p.work.splits) {
      Stage stage;
      stage.bucket = p.head_caches + head_cache, stage.meta = meta_of(0, 1, 0);
      if (!p.work.cu_queries) expect_query<kDim, kN>(p, stage, block);
      if (!p.work.window && first * P::kTokens < p.work.max_tokens)
        after.handle = p.table[row_number * p.table_row + divide(first, p.by_block_stages)];
    }

  auto& place = places[warp];
  const PackedCut& cut = place.cut;
  {
    const PackedCut own(p.work, block * kColumns);
    if (!(threadIdx.x & 31)) place.cut = own;
    __syncwarp();
  }
  PackedWalk<PackedWork<kPlain>> walk;
  int chunk = 0, end = 1;
  if (!kPlain && cut.deep) {
    const auto row = p.work.row(row_number, cut.column);
    const int blocks = cut.blocks_of(p.work, row.stages);
    if (turn >= blocks) return;
    walk.of_head_cache(place, row, head_cache, first, blocks * kWarps);
    if ((threadIdx.x & 31) < kColumns) sums[warp][threadIdx.x & 31] = make_float2(0.f, 0.f);
    __syncwarp();
  } else {
    // Blocks i, i + multiprocessors, .. share a multiprocessor; they take adjacent chunks, equally many per multiprocessor.
    const int wave = divide(blockIdx.x, p.by_multiprocessors), resident = divide(gridDim.x, p.by_multiprocessors);
    const int number = (blockIdx.x - wave * p.multiprocessors) * resident + wave, worker = number * kWarps + warp;
    const int each = (cut.used + p.multiprocessors - 1) / p.multiprocessors, in_turn = worker % p.work.workers;
    const bool spread = !cut.split && each < p.work.workers;
    if (spread && in_turn >= each) return;
    chunk = spread ? worker / p.work.workers * each + in_turn : worker;
    end = spread ? min(chunk + 1, cut.used) : cut.used;
  }
  for (; chunk < end; chunk += gridDim.x * kWarps) {
    if (kPlain || !cut.deep) walk.of_chunk(p.work, place, chunk);
    const auto produce = [&](int at, const PackedStage& stage) {
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
      in_page.page += stage.handle * p.block_bytes;
      in_page.meta = meta_of(0, 1, part_of(stage.meta) % P::kParts);
      fill<false>(ring, at, slots + at * kSlot, in_page, size, 0);
    };
    // Stages of the warp; one whose bucket is -1 is past the end. The first two rounds only fill the queue, so that this code
    // exists only once.
    next.bucket = after.bucket = -1;
    State<kDim, kN> st;
    int bucket = -1;
    for (int round = 0;; round++) {
      const int at = round & 1;
      now = next, next = after;
      after.bucket = -1;
      walk.next(p.work, place, !round);
      if (walk.live())
        after = stage_of<P, kDim>(p, walk, place, !kPlain && !round && cut.deep && !p.work.window, after.handle);
      const bool another = now.bucket != bucket;
      if (another && bucket >= 0) {
        int number = chunk + bucket - p.head_caches;  // index of the partial
        if constexpr (kPlain) number += bucket < p.head_caches ? bucket + 1 + p.head_caches : bucket - p.head_caches;
        const i64 slot = (static_cast<i64>(number) * gridDim.y + block) * kColumns;
        const bool here = !kPlain && cut.deep;
        write_partial(st, st.queries * p.group - block * kColumns, !kPlain || bucket >= p.head_caches,
                      here ? sums[kPlain ? 0 : warp] : p.partial_sum + slot,
                      here ? reinterpret_cast<float*>(slots) : p.partial_out + slot * kDim);
      }
      if (now.bucket < 0 && round >= 2) break;
      if (another) {
        bucket = now.bucket;
        load_query(p, st, now, block);
        // Before the next page is requested, since its address may have to be loaded first.
        if (now.bucket >= 0) begin_bucket<In, false, false, kOrdered>(p, st, now, block);
        if constexpr (kPlain)
          if (now.bucket >= 0) st.skip = p.work.row(Owner(p, now).row, 0).sinks;
      }
      if (next.bucket >= 0) produce(at ^ 1, next);
      ring.commit();
      if (next.bucket >= 0 && next.bucket != now.bucket) expect_query<kDim, kN>(p, next, block);
      if (now.bucket < 0) continue;
      ring.wait(at, 2);
      bool plain = false;
      if constexpr (kPlain) plain = !tier_of(now.meta);
      unsigned char* stage = slots + at * kSlot;
      const int tokens = tokens_of(now.meta), number = part_of(now.meta);
      if (plain) attend_rows<In, Rows, false, false>(p, st, stage, tokens, bucket, number * 16);
      else attend_codes<T, P, false, false>(p, st, stage, tokens, bucket, number * P::kTokens);
      __syncwarp();
    }
    __syncwarp();
  }
  if constexpr (!kPlain)
    if (cut.deep) {
      __syncthreads();
      const i64 slot = (static_cast<i64>(head_cache) * p.work.splits + turn) * gridDim.y + block;
      const int columns = p.queries_of(row_number) * p.group - block * kColumns;
      merge_warps<kDim, kColumns, kWarps>(p, sums, reinterpret_cast<float*>(shared), kOfWarp / 4, columns, slot);
    }
}
