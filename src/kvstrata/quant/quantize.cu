// K and V rows of one head to whole pages of codes: a warp writes one side of a tile of 16 tokens.
//
//   rows [16, D] --round to the row's grid--> --32 dims at a time: mma with a Hadamard matrix--> --butterflies over steps-->
//   exact sums, in float32 --subtract the centre--> transformed rows --reduce, encode, refit--> codes, in the page's order
//
// The rotation's factor (block ^ -0.5) is applied with the scale: until then rows are sqrt(block) too long.
//
// The product leaves every lane with exactly the values whose codes it owns in the page (layout/fragments.py): K with
// tokens as rows of the product, V with dims as rows. So lanes exchange data only in reductions, and a lane's words are
// written in 16-, 8- or 4-byte stores.
//
// A warp loops over tiles: while it processes one, the rows of the next are copied into shared memory, and the row indices of
// the one after that. If a word is shared by two tiles (head dims whose number of steps is not a multiple of 2 or 4), a block
// is a page instead, its rows are loaded into registers directly, and its codes are assembled in shared memory.
//
// A token may also be given as codes of another tier, which are already rotated: a tile with such tokens is built from both,
// in separate code that does not slow down the others.
//
// Rows that are not finite, or too large for the fast way to round them to their grid, are recognised by their largest value;
// such a tile is processed in float32, with every value cleaned first. Both ways, and the other kernels, give the bits of
// quant/reference.py.
#include "quantize_coded.cuh"
#include "quantize_encode.cuh"
#include "quantize_rows.cuh"

struct Params {
  const char* k;
  const char* v;
  unsigned char* pool;
  const void* pages;     // Index [n] destination, in units of 64 bytes
  const void* source;    // Index [n, tokens of a page] row of k; negative: an empty slot. i64: address of the row, or codes
  const void* v_source;  // same for v
  const int* heads;      // [n]
  const float* centre;   // [m, D], subtracted from K, in the model's space; null: none
  const int* centres;    // [n] row of centre and of direction; null: there are neither
  // int8 [m, D] of K, see `aim` in quant/reference.py; null: none
  const signed char* direction;
  i64 k_head, v_head;  // strides in bytes
  int k_token, v_token;
  int n;
  Tier tiers[kMaxTiers];  // i64: tiers of the pages that codes come from
};

// A tile of arbitrary rows: some to be cleaned and, if `coded`, some given as codes: `rows` are those of the tile. (Not a null
// pointer for those without codes: see tests/test_machine_code.py.)
template <class In, int kSteps, int kBits, int kTiles, bool kIsV, bool kRotate, bool kByAddress, class Source, class Along>
__device__ __forceinline__ void quantize_any(const Source& source, const float* centre, const Along& direction, bool coded,
                                             const i64* rows, const Tier* tiers, unsigned char* to, int tile,
                                             unsigned char* scales) {
  Tile<kSteps> f;
  int kept = -1;
  if (!kByAddress || !coded || __any_sync(~0u, is_plain(__ldg(rows + (threadIdx.x & 15))))) {
    transform_any<In, kSteps, kIsV, kRotate, false>(f, source, centre);
  } else {
    clear<kSteps>(f);
  }
  if (kByAddress && coded) {
    const Coded<16 * kSteps, 16 * kTiles, kIsV> given(rows, tiers);
    given.put_all(f, 1.f / rotation_factor<kSteps, kRotate>());
    kept = given.kept(kBits);
  }
  write_side<kSteps, kBits, kTiles, kIsV, kRotate>(f, 0, kept, to, tile, scales, AllTokens{}, direction);
}

// Separate from tiles of clean plain rows, which need the registers.
template <class In, int kSteps, int kBits, int kTiles, bool kIsV, bool kRotate, bool kByAddress, class Source, class Along>
__device__ __noinline__ void quantize_rarely(Source source, const float* centre, Along direction, bool coded, const i64* rows,
                                             const Tier* tiers, unsigned char* to, int tile, unsigned char* scales) {
  quantize_any<In, kSteps, kBits, kTiles, kIsV, kRotate, kByAddress>(source, centre, direction, coded, rows, tiers, to, tile,
                                                                     scales);
}

// One side of a tile, from rows to codes and scales in the page.
template <class In, int kSteps, int kBits, int kTiles, bool kIsV, bool kRotate, bool kByAddress, class Source, class Along>
__device__ __forceinline__ void quantize_side(const Source& source, const float* centre, const Along& direction, bool coded,
                                              const i64* rows, const Tier* tiers, unsigned char* to, int tile,
                                              unsigned char* scales) {
  if constexpr (sizeof(In) == 2) {  // float32 has no fast path
    if (!kByAddress || !coded) {
      Operands<In, kSteps, kIsV, kRotate> operands;
      if (operands.load(source)) {
        Tile<kSteps> f;
        operands.transform(f, source, centre);
        write_side<kSteps, kBits, kTiles, kIsV, kRotate>(f, operands.own_exponent(), -1, to, tile, scales, AllTokens{},
                                                            direction);
        return;
      }
    }
    quantize_rarely<In, kSteps, kBits, kTiles, kIsV, kRotate, kByAddress>(source, centre, direction, coded, rows, tiers, to,
                                                                          tile, scales);
  } else {
    quantize_any<In, kSteps, kBits, kTiles, kIsV, kRotate, kByAddress>(source, centre, direction, coded, rows, tiers, to, tile,
                                                                       scales);
  }
}

// A block is a page if its tiles share words, else one warp: warps that start at different times load and compute at
// different times, and so keep both memory and arithmetic busy.
template <class In, int kKBits, int kVBits, int kSteps, int kTiles> struct Cut {
  static constexpr bool kStaged = !Codes<kKBits, kSteps>::kWhole || !Codes<kVBits, kSteps>::kWhole;
  static constexpr int kThreads = kStaged ? kTiles * 64 : 32;
  // Blocks per multiprocessor, so that the compiler uses at most 80, 128, 168 or 255 registers: as few as hardly spill.
  static constexpr int kBlocks = kStaged || kSteps > 8 ? 8 / (kThreads / 32)
                                 : sizeof(In) == 4     ? 12
                                 : kSteps <= 4         ? 24
                                 : kKBits + kVBits > 8 ? 12
                                                       : 16;
};

// One side of the pages: its rows, and their destination.
template <class In, int kDim, int kKBits, int kVBits, int kTokens, bool kRotate, class Index, bool kIsV>
struct Side {
  static constexpr bool kByAddress = sizeof(Index) == 8, kAims = has_direction(kIsV ? kVBits : kKBits, kIsV);
  using Along = Direction<kAims>;
  static constexpr int kSteps = kDim / 16, kTiles = kTokens / 16;
  static constexpr int kKBytes = code_bytes(kKBits, kSteps * kTiles), kVBytes = code_bytes(kVBits, kSteps * kTiles);
  const Params& p;
  int tile;

  // Source rows and destination of a page's tile.
  struct Asked {
    Index row[16], page;
    int head, centre;
  };
  __device__ __forceinline__ const Index* rows(int n) const {
    return static_cast<const Index*>(kIsV ? p.v_source : p.source) + static_cast<i64>(n) * kTokens + tile * 16;
  }
  __device__ __forceinline__ const char* row_address(Index row, int head) const {
    const char* base = kIsV ? p.v + head * p.v_head : p.k + head * p.k_head;
    return base + (kByAddress ? static_cast<i64>(row) : static_cast<i64>(row) * (kIsV ? p.v_token : p.k_token));
  }
  __device__ __forceinline__ unsigned char* address(Index page) const { return p.pool + static_cast<i64>(page) * kUnitBytes; }

  // `codes`: destination of the page's codes.
  template <class Source>
  __device__ __forceinline__ void make(int n, const Source& source, const float* centre, const Along& direction, bool coded,
                                       unsigned char* codes, unsigned char* page) const {
    quantize_side<In, kSteps, kIsV ? kVBits : kKBits, kTiles, kIsV, kRotate, kByAddress>(
        source, centre, direction, coded, reinterpret_cast<const i64*>(rows(n)), p.tiers, codes + (kIsV ? kKBytes : 0), tile,
        page + kKBytes + kVBytes);
  }

  // This warp's tile of one page; codes go to shared memory.
  __device__ __forceinline__ void once(int n, unsigned char* codes, float* centre, uint4* weights, unsigned char* page) const {
    const int head = __ldg(p.heads + n);
    if constexpr (!kIsV) {
      if (p.centre) rotate_centre<kSteps, kRotate>(centre, p.centre + static_cast<i64>(__ldg(p.centres + n)) * kDim);
      else no_centre<kSteps>(centre);
    }
    if constexpr (kAims)
      if (p.direction) lay_direction<kSteps>(weights, p.direction + static_cast<i64>(__ldg(p.centres + n)) * kDim);
    bool coded = false;
    InMemory<In> source;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const Index row = __ldg(rows(n) + (threadIdx.x & 31) / 4 + 8 * i);
      source.there[i] = is_plain(row);
      source.row[i] = row_address(row, head) + threadIdx.x % 4 * 4 * sizeof(In);
      coded |= is_coded(row);
    }
    make(n, source, centre, Along{weights, p.direction != nullptr}, kByAddress && __any_sync(~0u, coded), codes, page);
  }

  // A tile of page after page: rows of two tiles and row indices of four are in shared memory. The next rows are requested
  // before waiting for those of this tile.
  using Stage = InStage<In, kSteps>;

  __device__ __forceinline__ void ask(Asked& asked, int n) const {
    const int lane = threadIdx.x & 31;
    const Index* from = lane < 16 ? rows(n) + lane : static_cast<const Index*>(p.pages) + n;
    if (lane < 17) cp_async_or_zero<sizeof(Index)>(shared_address(asked.row) + lane * sizeof(Index), from, true);
    const int* more = lane == 17 ? p.heads : p.centres;
    if (lane == 17 || (lane == 18 && !kIsV && more))
      cp_async_or_zero<4>(shared_address(&asked.head) + (lane - 17) * 4, more + n, true);
  }

  // The centre and the direction are copied with the rows if they differ from those of the previous tile.
  template <class T>
  __device__ __forceinline__ void copy_row(T* to, const T* of_rows, int row) const {
    constexpr int kPer = 16 / sizeof(T);
    const T* from = of_rows + static_cast<i64>(row) * kDim;
    for (int dim = (threadIdx.x & 31) * kPer; dim < kDim; dim += 32 * kPer)
      cp_async_or_zero<16>(shared_address(to + dim), from + dim, true);
  }

  // Four lanes copy a row; zeros if it is not plain.
  __device__ __forceinline__ void copy(unsigned to, const Asked& asked) const {
    constexpr int kRow = Stage::Rows::kBytes;
    const int first = Stage::row_to_copy(), chunk = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const Index row = asked.row[first + 8 * i];
      const bool there = is_plain(row);
      const char* from = row_address(there ? row : 0, asked.head) + chunk * 16;
      unsigned place[2];  // offsets of chunks 0 to 3 and 4 to 7; eight chunks further is 128 bytes further
#pragma unroll
      for (int half = 0; half < 2; half++) place[half] = to + Stage::Rows::offset(first + 8 * i, chunk + 4 * half);
#pragma unroll
      for (int c = 0; c < kRow; c += 64)  // single tokens from anywhere: the rest of a line may belong to another token
        if (c + 64 <= kRow || c + chunk * 16 < kRow)
          cp_async_or_zero<16, !kByAddress>(place[c / 64 % 2] + c / 128 * 128, from + c, there);
    }
  }

  // Pages n, n + step and so on, before `end`.
  __device__ __forceinline__ void all(unsigned char* stages, int n, int end, int step) const {
    if (n >= end) return;
    const int lane = threadIdx.x & 31;
    const bool centred = !kIsV && p.centre, aimed = kAims && p.direction;
    Asked* asked = reinterpret_cast<Asked*>(stages + 2 * Stage::kBytes);
    float* centre = reinterpret_cast<float*>(asked + 4);
    float* centres = centre + 2 * kDim;  // as given, of two tiles
    uint4* weights = reinterpret_cast<uint4*>(centres + 2 * kDim);
    signed char* directions = reinterpret_cast<signed char*>(weights + 4 * kSteps);  // as given, of two tiles
    if (!kIsV && !centred) no_centre<kSteps>(centre);
    ask(asked[0], n);
    commit_group();
    wait_group<0>();
    __syncwarp();
    if (n + step < end) ask(asked[1], n + step);
    commit_group();
    copy(shared_address(stages), asked[0]);
    if (centred) copy_row(centres, p.centre, asked[0].centre);
    if (aimed) copy_row(directions, p.direction, asked[0].centre);
    commit_group();
#pragma unroll 1
    for (int i = 0; n < end; n += step, i++) {
      wait_group<1>();  // row indices, requested before the last rows
      __syncwarp();     // also: data of the previous tile may be overwritten
      if (n + 2 * step < end) ask(asked[(i + 2) % 4], n + 2 * step);
      commit_group();
      const Asked &current = asked[i % 4], &next = asked[(i + 1) % 4], &last = asked[(i + 3) % 4];
      if (n + step < end) {
        copy(shared_address(stages + (i + 1) % 2 * Stage::kBytes), next);
        if ((centred || aimed) && next.centre != current.centre) {
          if (centred) copy_row(centres + (i + 1) % 2 * kDim, p.centre, next.centre);
          if (aimed) copy_row(directions + (i + 1) % 2 * kDim, p.direction, next.centre);
        }
      }
      commit_group();
      wait_group<2>();  // the rows of this tile
      __syncwarp();
      const bool first = is_plain(current.row[lane / 4]), second = is_plain(current.row[lane / 4 + 8]);
      const Stage source{stages + i % 2 * Stage::kBytes, {first, second}};
      unsigned char* page = address(current.page);
      const bool coded = kByAddress && __any_sync(~0u, is_coded(current.row[lane & 15]));
      if ((centred || aimed) && (i == 0 || current.centre != last.centre)) {
        if (centred) rotate_centre<kSteps, kRotate>(centre, centres + i % 2 * kDim);
        if (aimed) lay_direction<kSteps>(weights, directions + i % 2 * kDim);
      }
      make(n, source, centre, Along{weights, aimed}, coded, page, page);
    }
  }
};

// Index: int, or i64 for rows and pages given by address.
template <class In, int kDim, int kKBits, int kVBits, int kTokens, bool kRotate, class Index = int,
          int kSteps = kDim / 16, int kTiles = kTokens / 16>
__global__ void __launch_bounds__(Cut<In, kKBits, kVBits, kSteps, kTiles>::kThreads,
                                  Cut<In, kKBits, kVBits, kSteps, kTiles>::kBlocks)
    quantize_pages(const __grid_constant__ Params p) {
  using K = Side<In, kDim, kKBits, kVBits, kTokens, kRotate, Index, false>;
  using V = Side<In, kDim, kKBits, kVBits, kTokens, kRotate, Index, true>;
  extern __shared__ __align__(512) unsigned char shared[];  // of the longest row, for Swizzle
  if constexpr (Cut<In, kKBits, kVBits, kSteps, kTiles>::kStaged) {
    constexpr int kBytes = K::kKBytes + K::kVBytes;
    const int n = blockIdx.x, warp = threadIdx.x >> 5;
    float* centres = reinterpret_cast<float*>(shared + kBytes);  // of the warps of K; then their directions
    for (int i = threadIdx.x * 16; i < kBytes; i += kTiles * 64 * 16)
      *reinterpret_cast<uint4*>(shared + i) = make_uint4(0, 0, 0, 0);
    __syncthreads();
    unsigned char* page = K{p, warp}.address(__ldg(static_cast<const Index*>(p.pages) + n));
    uint4* weights = reinterpret_cast<uint4*>(centres + 2 * kTiles * kDim);
    if (warp < kTiles) K{p, warp}.once(n, shared, centres + 2 * warp * kDim, weights + 4 * warp * kSteps, page);
    else V{p, warp - kTiles}.once(n, shared, nullptr, nullptr, page);
    __syncthreads();
    for (int i = threadIdx.x * 16; i < kBytes; i += kTiles * 64 * 16)
      *reinterpret_cast<uint4*>(page + i) = *reinterpret_cast<const uint4*>(shared + i);
  } else {
    // First K, then V in rounds, each of which handles half of the rest, so that all warps end at about the same time.
    // Tiles of a page are processed together: sectors that they share are merged in L2.
    const int tile = blockIdx.x % kTiles, n = blockIdx.x / kTiles, step = gridDim.x / kTiles, round = blockIdx.y - 1;
    const int left = (p.n + step - 1) / step;
    if (round < 0) {
      K{p, tile}.all(shared, n, p.n, step);
    } else {
      const int done = left - (left >> round), next = left - (left >> (round + 1));
      V{p, tile}.all(shared, n + step * done, min(p.n, step * next), step);
    }
  }
}
