// quantize_tokens.cu with unquantised rows in addition to the pages: the newest, unfinished page of a request stays in its tail,
// and is packed when its last token is stored; its first tokens are also kept as sink rows (store/packed/plain_rows.py).
//
//   page unfinished   run of rows ---------------------> tail
//   page finished     tokens of the tile in the tail,
//                     then the run's rows  ------------> codes, stored as a whole tile
//
// Position p is row p % tail_tokens of the tail: the last tail_tokens positions of a call stay there. A row that a page is
// packed from may have to hold a new token after that: the warp that read it then copies that token, and no other does.
#include "quantize_runs.cuh"

// Tail or sink rows: [slots, heads, tokens, D].
struct PlainRows {
  char *k, *v;
  const int* slots;        // [requests]
  i64 request, head;       // strides in bytes
  int tokens, max_requests;  // tokens 0: none
};

struct TailParams : Params {
  const int* seq_lens;     // [requests]
  const int* cu_queries;   // [requests + 1], or null: `each` rows of every request
  PlainRows tail, sinks;
  int requests, each;
  int parts;               // warps that share the tiles of a page: all of them, or 1
};

// The request of a row, the same for all lanes.
struct Request {
  int first = 0, count = 0;  // its rows in the call
  int length = 0, begin = 0;  // begin: position of its first row
  int tail = -1, sinks = -1;  // slots
  int older = 0;              // positions of the page of its first row that come from the tail: 0 if the page is not completed

  // Called by whole warps.
  __device__ __forceinline__ Request(const TailParams& p, int row) {
    int number = 0;
    if (p.cu_queries) {
      for (int i = 0; i < p.requests; i += 32) {
        const int mine = i + static_cast<int>(threadIdx.x & 31);
        number += __popc(__ballot_sync(~0u, mine < p.requests && p.cu_queries[mine + 1] <= row));
      }
    } else {
      number = row / p.each;
    }
    if (number >= p.requests) {
      count = p.tokens;  // of no request
      return;
    }
    first = p.cu_queries ? p.cu_queries[number] : number * p.each;
    count = p.cu_queries ? p.cu_queries[number + 1] - first : p.each;
    length = p.seq_lens[number];
    begin = length - count;
    if (row < first) {
      count = first - row, first = row;
      return;
    }
    if (begin < 0) return;
    tail = slot_of(p.tail, number), sinks = slot_of(p.sinks, number);
  }
  static __device__ __forceinline__ int slot_of(const PlainRows& rows, int number) {
    if (!rows.tokens) return -1;
    const int slot = rows.slots[number];
    return static_cast<unsigned>(slot) < static_cast<unsigned>(rows.max_requests) ? slot : -1;
  }
};

template <class S, class Slot>
struct Tailed {
  using Rows = typename S::Rows;
  static constexpr int kPage = S::kTiles * 16, kRow = Rows::Rows::kBytes;
  const S& side;
  const TailParams& p;
  unsigned char *rows, *zeros;

  __device__ __forceinline__ char* place(const PlainRows& to, int slot, int token) const {
    return (S::kIsV_ ? to.v : to.k) + slot * to.request + side.head * to.head + static_cast<i64>(token) * kRow;
  }
  // A row in shared memory to memory.
  __device__ __forceinline__ void keep(char* to, int row) const {
    for (int chunk = threadIdx.x & 31; chunk < Rows::Rows::kChunks; chunk += 32)
      *reinterpret_cast<uint4*>(to + chunk * 16) = *reinterpret_cast<const uint4*>(rows + Rows::Rows::offset(row, chunk));
  }
  __device__ __forceinline__ static void arrive() {
    commit_group();
    wait_group<0>();
    __syncwarp();
  }

  // The request of a row. If its first row has no slot, the page of that row is unknown, and none is completed.
  __device__ __forceinline__ Request request_of(int row) const {
    Request r(p, row);
    const int in_page = r.begin % kPage;
    if (r.tail < 0 || !in_page || r.begin - in_page + kPage > r.length) return r;
    const Slot slot = static_cast<const Slot*>(p.slot_mapping)[r.first * p.slot_stride];
    if (slot >= 0 && slot < p.slots) r.older = in_page;
    return r;
  }

  // Copies newer tokens to the rows of tokens `from` to `end` of the page of the request's first row, which have been read.
  __device__ __forceinline__ void replace(const Request& r, int from, int end) const {
    const int page = r.begin - r.begin % kPage;
    for (int token = from; token < end; token++) {
      const int position = page + token + (r.length - 1 - page - token) / p.tail.tokens * p.tail.tokens;
      if (position < r.begin) continue;
      const i64 row = r.first + position - r.begin, slot = static_cast<const Slot*>(p.slot_mapping)[row * p.slot_stride];
      if (slot < 0 || slot >= p.slots) continue;
      const char* new_row = side.row(row);
      char* to = place(p.tail, r.tail, position % p.tail.tokens);
      for (int byte = (threadIdx.x & 31) * 16; byte < kRow; byte += 512)
        *reinterpret_cast<uint4*>(to + byte) = *reinterpret_cast<const uint4*>(new_row + byte);
    }
  }

  // A tile of the page of row `row`: `before` tokens from the tail, then `count` rows, `copied` of which are already being
  // copied to shared memory. `slot`: of the first of those rows or, if there are none, of the tile.
  __device__ __forceinline__ void write_tile(const Request& r, int row, int slot, int before, int count, int copied,
                                             const float* centre) const {
    const int position = r.begin + row - r.first, page = position - position % kPage, first = slot % kPage - before % 16;
    if (before) Rows::copy(rows, place(p.tail, r.tail, (page + first) % p.tail.tokens), kRow, 0, before);
    Rows::copy(rows, side.row(row) - before * side.stride(), side.stride(), before + copied, before + count);
    arrive();
    if (r.tail < 0 || page + kPage <= r.length) {
      const SomeTokens tokens{first % 16, before + count};
      side.write(Rows(rows, zeros, tokens), centre, slot, tokens);
    }
    __syncwarp();
    if (r.tail >= 0) {
      const int of_first = r.begin - r.begin % kPage;
      for (int i = max(0, r.length - p.tail.tokens - position); i < count; i++)
        if ((position + i - of_first) % p.tail.tokens >= r.older)  // otherwise replace() does
          keep(place(p.tail, r.tail, (position + i) % p.tail.tokens), before + i);
    }
    if (r.sinks >= 0)
      for (int i = 0; i < count && position + i < p.sinks.tokens; i++) keep(place(p.sinks, r.sinks, position + i), before + i);
    if (before) replace(r, first, first + before);
    __syncwarp();  // the next rows go to the same memory
  }

  __device__ __forceinline__ void write_window(int part, float* begin) const {
    const int first = blockIdx.x * p.window;
    Rows::copy(rows, side.row(first), 0, 0, 1);
    const Window window(*side.slot_address(first), p, first, p.window);
    Rows::clear(zeros);
    if (!window.starts) return;
    const float* centre = side.centre(begin);
    // The row of the window's first token is in flight; its memory must not be reused before it has arrived.
    bool copied = window.starts & 2;
    if (!copied) arrive();
    for (unsigned starts = window.starts; starts; starts &= starts - 1) {
      const int start = __ffs(starts) - 1;
      int slot = window.slot_of(start), row = first - 1 + start;
      for (int left = window.count(start); left;) {  // a run of two requests, if neither has a tail
        const Request r = request_of(row);
        const int count = min(left, r.first + r.count - row), tile = slot % kPage / 16;
        const bool finishes = row == r.first && r.older;  // completes its page: the tiles before come from the tail
        if (finishes && copied) {
          arrive();
          copied = false;
        }
#pragma unroll 1
        for (int t = finishes ? 0 : tile; t <= tile; t++) {
          if (p.parts > 1 && t != part) continue;
          const bool own = t == tile;
          write_tile(r, row, own ? slot : slot - slot % kPage + 16 * t, finishes ? own ? slot % 16 : 16 : 0, own ? count : 0,
                     own && copied, centre);
        }
        if (copied && p.parts > 1 && tile != part) arrive();
        copied = false;
        row += count, slot += count, left -= count;
      }
    }
  }
};

// Blocks per multiprocessor: fewer than in quantize_tokens.cu, since more is kept in registers.
template <class In, int kDim, bool kBalance>
constexpr int kBlocksOfTail = kDim > 64 || sizeof(In) == 4 || kBalance ? 8 : 12;

template <class In, int kDim, int kKBits, int kVBits, int kTokens, bool kRotate, bool kBalance, class Slot>
__global__ void __launch_bounds__(32, kBlocksOfTail<In, kDim, kBalance>) quantize_tail(const __grid_constant__ TailParams p) {
  using K = Side<In, kDim, kKBits, kVBits, kTokens, kRotate, kBalance, false, Slot>;
  using V = Side<In, kDim, kKBits, kVBits, kTokens, kRotate, kBalance, true, Slot>;
  extern __shared__ __align__(512) unsigned char shared[];  // of the longest row, for Swizzle
  unsigned char* zeros = shared + 16 * K::Rows::Rows::kBytes;
  float* begin = reinterpret_cast<float*>(zeros + K::Rows::Rows::kBytes);
  wait_for_previous();
  release_next();
  const int number = blockIdx.y / p.parts, part = blockIdx.y % p.parts, head = number >> 1;
  if (number & 1) {
    const V v{p, head};
    Tailed<V, Slot>{v, p, shared, zeros}.write_window(part, nullptr);
  } else {
    const K k{p, head};
    Tailed<K, Slot>{k, p, shared, zeros}.write_window(part, begin);
  }
}
