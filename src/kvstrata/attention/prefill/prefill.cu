// Attention of many queries over keys and values in memory; scores, weights and the output accumulator stay in
// registers.
//
//   K, V --cp.async--> ring in shared memory --ldmatrix--> operands of the products
//   Q    --cp.async--> shared memory --ldmatrix--> registers, once; its memory is reused to reorder the output
//
// A warp has 16 queries (or a multiple): S = Q K^T leaves them as rows, so the weights are already the A operand of P V.
//
//   prefill_tile.cuh     parameters, sizes, order of the work     prefill_softmax.cuh  scores to weights
//   prefill_check.cuh    the checking build                       prefill_end.cuh      sum over KV warps, output and lse
#include "barrier.cuh"
#include "cp_async.cuh"
#include "ldmatrix.cuh"
#include "mma.cuh"
#include "pdl.cuh"
#include "prefill_check.cuh"
#include "prefill_end.cuh"
#include "prefill_softmax.cuh"
#include "prefill_tile.cuh"

// Copies rows `first` .. of `from` into a tile in shared memory; rows from `end` on are zeros.
template <class T, int kRows, int kThreads>
__device__ __forceinline__ void copy_rows(unsigned to, const char* from, unsigned stride, int first, int end,
                                          unsigned thread) {
  constexpr unsigned kChunks = T::Layout::kChunks, kAll = kRows * kChunks;
  constexpr bool kWholeRows = kThreads % kChunks == 0;  // a thread keeps its column
#pragma unroll
  for (unsigned turn = 0; turn < kAll; turn += kThreads) {
    const unsigned row = kWholeRows ? thread / kChunks + turn / kChunks : (thread + turn) / kChunks;
    const unsigned chunk = (kWholeRows ? thread : thread + turn) % kChunks;
    if (kAll % kThreads && row >= kRows) break;
    const unsigned at = to + T::Layout::offset(row, chunk), there = first + row;
    cp_async_or_zero<16>(at, from + chunk * 16 + static_cast<unsigned long long>(there) * stride,
                         static_cast<int>(there) < end);
  }
}

template <class T> using Query = unsigned[T::kKeepQuery ? T::kRowTiles : 1][T::kKeepQuery ? T::kSteps : 1][4];

template <class T>
__device__ __forceinline__ void load_query(unsigned (&a)[4], unsigned query_rows, int r, int step, int lane) {
  const unsigned row = RowsFirst::row(lane), chunk = RowsFirst::chunk(lane);
  ldmatrix_x4(a, r * 16 * T::Layout::kBytes +
                     T::Layout::further(query_rows + T::Layout::offset(row, chunk), row, chunk, step));
}

// S = Q K^T
template <class In, class T>
__device__ __forceinline__ void multiply_keys(const Query<T>& query, unsigned query_rows, unsigned k_tile,
                                              ScoresOf<T>& s, int lane) {
  const unsigned row = ChunksFirst::row(lane), chunk = ChunksFirst::chunk(lane);
  const unsigned here = k_tile + T::Layout::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < T::kRowTiles * T::kKeyTiles * 4; i++) (&s[0][0][0])[i] = 0.f;
#pragma unroll
  for (int step = 0; step < T::kSteps; step++) {
    unsigned a[T::kRowTiles][4];
#pragma unroll
    for (int r = 0; r < T::kRowTiles; r++) {
      if constexpr (T::kKeepQuery) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[r][i] = query[r][step][i];
      } else {
        load_query<T>(a[r], query_rows, r, step, lane);
      }
    }
#pragma unroll
    for (int n = 0; n < T::kKeyTiles; n += 2) {
      unsigned b[4];
      ldmatrix_x4(b, n * 8 * T::Layout::kBytes + T::Layout::further(here, row, chunk, step));
#pragma unroll
      for (int r = 0; r < T::kRowTiles; r++) {
        mma_16x8x16(In{}, s[r][n], a[r], b[0], b[1]);
        mma_16x8x16(In{}, s[r][n + 1], a[r], b[2], b[3]);
      }
    }
  }
}

// O += P V; the weights of 16 keys at a time are computed just before they are used.
template <class In, class T, bool kChecked>
__device__ __forceinline__ void multiply_values(State<T>& st, const ScoresOf<T>& s, float to_log2,
                                                const float (&base)[T::kRowTiles][2], unsigned v_tile,
                                                unsigned char* kept, int lane) {
  const unsigned row = RowsFirst::row(lane), chunk = RowsFirst::chunk(lane);
  const unsigned here = v_tile + T::Layout::offset(row, chunk);
#pragma unroll
  for (int step = 0; step < T::kN / 16; step++) {
    unsigned w[T::kRowTiles][4];
#pragma unroll
    for (int r = 0; r < T::kRowTiles; r++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int half = i % 2;
        const float* x = &s[r][2 * step + i / 2][half * 2];
        const float first = exp2_of(x[0] * to_log2 - base[r][half]), second = exp2_of(x[1] * to_log2 - base[r][half]);
        st.l[r][half] += first + second;
        w[r][i] = pair_of(In{}, first, second);
      }
    if constexpr (kChecked) keep_weights<T>(kept, step, w, lane);
#pragma unroll
    for (int d = 0; d < T::kDimTiles; d += 2) {
      unsigned b[4];
      ldmatrix_x4_trans(b, step * 16 * T::Layout::kBytes + T::Layout::further(here, row, chunk, d / 2));
#pragma unroll
      for (int r = 0; r < T::kRowTiles; r++) {
        mma_16x8x16(In{}, st.out[r][d], w[r], b[0], b[1]);
        mma_16x8x16(In{}, st.out[r][d + 1], w[r], b[2], b[3]);
      }
    }
  }
}

template <class In, class T, bool kSoftcap, bool kChecked>
__device__ __forceinline__ void attend(const Params& p, unsigned char* shared) {
  const Item item = item_of<T>(p, blockIdx.x);
  if (item.rows <= 0) return;
  const int me = opaque(threadIdx.x), lane = me & 31, warp = __shfl_sync(~0u, me >> 5, 0);
  const int kv_warp = warp / T::kRowWarps, row_warp = warp % T::kRowWarps;
  const unsigned all = shared_address(shared), ring = all + T::kQueryBytes + kv_warp * T::kRingBytes;
  const unsigned query_rows = all + row_warp * T::kRows * T::Layout::kBytes;
  const char* const k = at(p.k, p.k_by, item.batch, item.kv_head, item.k_start);
  const char* const v = at(p.v, p.v_by, item.batch, item.kv_head, item.k_start);
  const int end = item.end, begin = item.begin + kv_warp * T::kN;  // keys; this KV warp starts at `begin`
  constexpr int kStride = T::kKvWarps * T::kN, kAhead = T::kStages - 1;
  const auto fill = [&](int key, unsigned to) {  // K, then V
    if (key < end) {
      const unsigned thread = opaque(me) % T::kRingThreads;
      const int first = opaque(key);
      copy_rows<T, T::kN, T::kRingThreads>(to, k, p.k_by.token, first, end, thread);
      copy_rows<T, T::kN, T::kRingThreads>(to + T::kHalfStage, v, p.v_by.token, first, end, thread);
    }
    commit_group();
  };
  const auto sync_ring = [&] {
    if constexpr (T::kKvWarps == 1) __syncthreads();
    else sync_some(1 + kv_warp, T::kRingThreads);
  };

  const char* const q = at(p.q, p.q_by, item.batch, item.head, item.q_start + item.row);
  copy_rows<T, T::kM, T::kThreads>(all, q, p.q_by.token, 0, item.rows, me);
  if constexpr (kAhead == 0) commit_group();
#pragma unroll
  for (int i = 0; i < kAhead; i++) fill(begin + i * kStride, ring + i * 2 * T::kHalfStage);
  wait_group<(kAhead > 1 ? kAhead - 1 : 0)>();
  __syncthreads();
  Query<T> query;
  if constexpr (T::kKeepQuery)
#pragma unroll
    for (int i = 0; i < T::kRowTiles * T::kSteps; i++)
      load_query<T>(query[i / T::kSteps][i % T::kSteps], query_rows, i / T::kSteps, i % T::kSteps, lane);

  const int place = item.row + row_warp * T::kRows + item.shift;  // position of the warp's first query
  unsigned char* kept = shared + T::kScoresAt + warp * T::kRows * T::kScoreRow;
  const float to_log2 = log2_factor<kSoftcap>(p);
  State<T> st;
  unsigned k_tile = ring;
  for (int key = begin; key < end; key += kStride) {
    fill(key + kAhead * kStride, (k_tile == ring ? ring + T::kRingBytes : k_tile) - 2 * T::kHalfStage);
    if constexpr (kAhead == 0) {
      wait_group<0>();
      sync_ring();
    }
    const unsigned v_tile = k_tile + T::kHalfStage;
    const int first = opaque(place), last = first + T::kRows - 1;
    if (!p.causal || key <= last) {
      ScoresOf<T> s;
      multiply_keys<In, T>(query, query_rows, k_tile, s, lane);
      if constexpr (kChecked)
        keep_scores<In, T>(p, kept, shared + (query_rows - all), shared + (k_tile - all), s, lane);
      if constexpr (kSoftcap) cap<T>(p, s);
      const bool past = key + T::kN > (p.causal ? min(first + 1, end) : end);
      if (past || (p.window && key <= last - p.window)) mask<T>(p, first, end, key, s, opaque(lane));
      float base[T::kRowTiles][2];
      rebase<T>(st, s, to_log2, base);
      if constexpr (kChecked) {
        const State<T> before = st;
        multiply_values<In, T, kChecked>(st, s, to_log2, base, v_tile, kept, lane);
        check_out<In, T>(p, kept, shared + (v_tile - all), st, before.out, lane);
      } else {
        multiply_values<In, T, kChecked>(st, s, to_log2, base, v_tile, kept, lane);
      }
    }
    if constexpr (kAhead > 0) wait_group<(kAhead > 1 ? kAhead - 1 : 0)>();
    sync_ring();
    k_tile += 2 * T::kHalfStage;
    if (k_tile == ring + T::kRingBytes) k_tile = ring;
  }
  finish<In, T>(p, st, shared, to_log2);
}

// kChecked: scores and weights also go through shared memory, where they are compared with plain sums.
template <class In, class T, bool kSoftcap, bool kChecked>
__global__ void __launch_bounds__(T::kThreads, T::kResident) prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  wait_for_previous();
  release_next();
  attend<In, T, kSoftcap, kChecked>(p, shared);
}
