// Many small copies in one launch. A block belongs to one copy, which it finds from the list of first blocks.
//
//   copy i   source  [size0, size1, size2]          any strides; 16 bytes at a time where rows are unbroken and addresses
//            target  [extent0, extent1, extent2]    and strides allow, narrower otherwise: each block works that out
//
// Extents are the source's sizes, or the target's if the part that the source does not cover is filled. An element is covered
// if its row is below the live rows and its column below the row's length: counts that may be on the device.
//
// Staged: sources are in one of two slots of pinned memory that the host fills alternately. A slot's header has the number
// of its step and the sizes; block 0 fetches it over the bus for all (reads of one address by many blocks are serialised
// there). A launch copies the next step, the last block to finish reports it to the host, and a launch without a new step
// does nothing.
#include "fp8.cuh"
#include "pdl.cuh"
#include "vec.cuh"

using i64 = long long;
using u64 = unsigned long long;
constexpr int kThreads = 256;
constexpr int kPer = 2;            // vectors per thread in flight
constexpr unsigned char kBits = 255;  // the kind of a copy without a cast
enum Flags { kFill = 1, kWideLengths = 2, kWideRows = 4, kFillLast = 8, kSkips = 16 };

struct Copy {
  char* target;
  const char* lengths;  // null: rows are as long as in the source
  const char* rows;     // null: all rows of the source are live
  i64 source_stride[3], target_stride[3];  // in bytes
  u64 fill;
  unsigned size[3], extent[3];
  int lengths_step, lengths_per, lengths_extra;  // bytes from one row's length to the next
  int rows_per, rows_extra;
  unsigned char bytes, source_kind, target_kind, flags;
};
static_assert(sizeof(Copy) == 128, "the host packs this");


constexpr int kHead = 64;  // words of a slot's header: number, unused, rows and columns of each source

struct Stage {
  unsigned* turn;       // on the device: steps done, blocks done, launches done, launch whose header is cached; the header
  volatile unsigned* done;  // on the host: steps done
  const char* number;  // number of the step in the first slot
  i64 slot_bytes;
};

// Fields that change from call to call come first.
template <int kCopies>
struct Params {
  const char* source[kCopies];
  Stage stage;
  Copy copies[kCopies];
  unsigned first[kCopies];  // block
};

__device__ __forceinline__ i64 count_at(const char* at, bool wide) {
  return wide ? *reinterpret_cast<const volatile i64*>(at) : *reinterpret_cast<const volatile int*>(at);
}

__device__ __forceinline__ i64 live(i64 count, int per, int extra) {
  if (per > 1) count = count > 0 ? (count + per - 1) / per : count / per;
  return count + extra;
}

__device__ __forceinline__ unsigned within(i64 count, unsigned most) {
  return count < 0 ? 0 : count < most ? static_cast<unsigned>(count) : most;
}

__device__ __forceinline__ void copy_element(char* to, const char* from, int bytes) {
  switch (bytes) {
    case 1: store<1>(to, load_once<1>(from)); break;
    case 2: store<2>(to, load_once<2>(from)); break;
    case 4: store<4>(to, load_once<4>(from)); break;
    case 8: store<8>(to, load_once<8>(from)); break;
    default: store<16>(to, load_once<16>(from));
  }
}

__device__ __forceinline__ void fill_element(char* to, u64 value, int bytes) {
  switch (bytes) {
    case 1: *reinterpret_cast<unsigned char*>(to) = static_cast<unsigned char>(value); break;
    case 2: *reinterpret_cast<unsigned short*>(to) = static_cast<unsigned short>(value); break;
    case 4: *reinterpret_cast<unsigned*>(to) = static_cast<unsigned>(value); break;
    default: *reinterpret_cast<u64*>(to) = value;
  }
}

template <int kBytes>
__device__ __forceinline__ void fill_unit(char* to, u64 value) {
  Vec<kBytes> out;
#pragma unroll
  for (int i = 0; i < Vec<kBytes>::kWords; i++)
    out.words[i] = static_cast<typename Vec<kBytes>::word>(i % 2 ? value >> 32 : value);
  store<kBytes>(to, out);
}

// Converts a value from one dtype to another as torch does: integers wrap, floats become integers towards zero.
__device__ void cast_element(char* to, int target, const char* from, int source) {
  i64 whole = 0;
  float real = 0.f;
  switch (source) {
    case 0: case 8: whole = *reinterpret_cast<const volatile unsigned char*>(from); break;
    case 1: whole = *reinterpret_cast<const volatile signed char*>(from); break;
    case 2: whole = *reinterpret_cast<const volatile short*>(from); break;
    case 3: whole = *reinterpret_cast<const volatile int*>(from); break;
    case 4: whole = *reinterpret_cast<const volatile i64*>(from); break;
    case 5: real = to_float(f16{*reinterpret_cast<const volatile unsigned short*>(from)}); break;
    case 6: real = to_float(bf16{*reinterpret_cast<const volatile unsigned short*>(from)}); break;
    default: real = *reinterpret_cast<const volatile float*>(from);
  }
  const bool from_real = source >= 5 && source != 8;
  if (target >= 5 && target != 8) {
    if (!from_real) real = static_cast<float>(whole);
    unsigned short half;
    switch (target) {
      case 5:
        asm("cvt.rn.f16.f32 %0,%1;" : "=h"(half) : "f"(real));
        *reinterpret_cast<unsigned short*>(to) = half;
        break;
      case 6:
        asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(half) : "f"(real));
        *reinterpret_cast<unsigned short*>(to) = half;
        break;
      default: *reinterpret_cast<float*>(to) = real;
    }
    return;
  }
  if (target == 8) {
    *reinterpret_cast<unsigned char*>(to) = from_real ? real != 0.f : whole != 0;
    return;
  }
  if (from_real) whole = static_cast<i64>(real);
  switch (target) {
    case 0: case 1: *reinterpret_cast<unsigned char*>(to) = static_cast<unsigned char>(whole); break;
    case 2: *reinterpret_cast<short*>(to) = static_cast<short>(whole); break;
    case 3: *reinterpret_cast<int*>(to) = static_cast<int>(whole); break;
    default: *reinterpret_cast<i64*>(to) = whole;
  }
}

// A block's view of its copy.
struct Work {
  const Copy& c;
  const char* source;
  i64 slot;            // bytes to the slot in use; 0 when not staged
  unsigned rows;       // live
  unsigned columns;    // live, except for rows with their own length
  unsigned per_vector;   // elements
  unsigned per_row;    // vectors
  i64 source_step, target_step;  // bytes from vector to vector of a row

  struct Place {
    const char* from;
    char* to;
    int covered, room;  // elements from here to the end of the covered part, and of the row
  };

  __device__ __forceinline__ Place at(unsigned n) const {
    const unsigned row = n / per_row, vector = n - row * per_row;
    const unsigned i0 = row / c.extent[1], i1 = row - i0 * c.extent[1];
    i64 end = i0 < rows && i1 < c.size[1] ? columns : 0;
    if (c.lengths_step && end) {
      const char* at = c.lengths + slot + static_cast<i64>(i0) * c.lengths_step;
      const i64 length = live(count_at(at, c.flags & kWideLengths), c.lengths_per, c.lengths_extra);
      end = length < 0 ? 0 : length < end ? length : end;
    }
    Place place;
    const int first = static_cast<int>(vector * per_vector);
    place.covered = static_cast<int>(end) - first;
    place.room = static_cast<int>(c.extent[2]) - first;
    place.from = source + i0 * c.source_stride[0] + i1 * c.source_stride[1] + vector * source_step;
    place.to = c.target + i0 * c.target_stride[0] + i1 * c.target_stride[1] + vector * target_step;
    return place;
  }
};

// The element of a 1-D copy that fills the rest.
__device__ __forceinline__ u64 last_of(const Work& w, int covered_from_start) {
  if (covered_from_start <= 0) return 0;
  const char* from = w.source + (covered_from_start - 1) * w.c.source_stride[2];
  switch (w.c.bytes) {
    case 1: return *reinterpret_cast<const volatile unsigned char*>(from);
    case 2: return *reinterpret_cast<const volatile unsigned short*>(from);
    case 4: return *reinterpret_cast<const volatile unsigned*>(from);
    default: return *reinterpret_cast<const volatile u64*>(from);
  }
}

template <int kBytes>
__device__ __forceinline__ void move_units(const Work& w, unsigned begin, unsigned end) {
  const int per_vector = static_cast<int>(w.per_vector), bytes = w.c.bytes;
  const bool fills = w.c.flags & kFill;
  for (unsigned n = begin + threadIdx.x; n < end; n += kThreads * kPer) {
    Work::Place place[kPer];
    Vec<kBytes> data[kPer];
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      place[i].covered = place[i].room = 0;
      if (n + i * kThreads < end) {
        place[i] = w.at(n + i * kThreads);
        if (place[i].covered >= per_vector) data[i] = load_once<kBytes>(place[i].from);
      }
    }
#pragma unroll
    for (int i = 0; i < kPer; i++) {
      const auto& at = place[i];
      if (at.covered >= per_vector) {
        store<kBytes>(at.to, data[i]);
      } else if (at.room > 0) {
        u64 value = w.c.fill;
        if (w.c.flags & kFillLast) {
          const unsigned vector = n + i * kThreads;  // one row, so the index of the vector is its position in the row
          value = last_of(w, at.covered + static_cast<int>(vector) * per_vector);
          for (int k = bytes; k < 8; k *= 2) value |= value << (8 * k);
        }
        if (kBytes <= 8 || bytes <= 8) {
          if (fills && at.covered <= 0 && at.room >= per_vector) {
            fill_unit<kBytes>(at.to, value);
            continue;
          }
        }
        const int room = at.room < per_vector ? at.room : per_vector;
#pragma unroll 1  // the edge of a row: rare, and unrolled it would be half of the code
        for (int e = 0; e < room; e++) {
          if (e < at.covered) copy_element(at.to + e * bytes, at.from + e * bytes, bytes);
          else if (fills) fill_element(at.to + e * bytes, value, bytes);
        }
      }
    }
  }
}

__device__ __forceinline__ void cast_units(const Work& w, unsigned begin, unsigned end) {
  for (unsigned n = begin + threadIdx.x; n < end; n += kThreads) {
    const Work::Place at = w.at(n);
    if (at.covered > 0) {
      cast_element(at.to, w.c.target_kind, at.from, w.c.source_kind);
    } else if (w.c.flags & kFillLast) {
      const int last = at.covered + static_cast<int>(n) - 1;
      if (last >= 0) cast_element(at.to, w.c.target_kind, w.source + last * w.c.source_stride[2], w.c.source_kind);
      else fill_element(at.to, 0, w.c.bytes);
    } else if (w.c.flags & kFill) {
      fill_element(at.to, w.c.fill, w.c.bytes);
    }
  }
}

template <int kCopies, bool kCasts, bool kStaged>
__global__ void __launch_bounds__(kThreads, 1024 / kThreads) copy_all(const __grid_constant__ Params<kCopies> p) {
  wait_for_previous();
  unsigned turn = 0;
  i64 slot = 0;
  bool due = true;
  if constexpr (kStaged) {
    __shared__ unsigned said[2];
    volatile unsigned* shared_turn = p.stage.turn;
    if (threadIdx.x == 0) said[0] = shared_turn[0], said[1] = shared_turn[2];
    __syncthreads();
    turn = said[0];
    slot = (turn & 1) * p.stage.slot_bytes;
    const unsigned launch = said[1] + 1;
    static_assert(2 + 2 * kCopies <= kHead, "room for the head");
    if (blockIdx.x == 0) {
      const int i = threadIdx.x;
      if (i < 2 + 2 * kCopies) shared_turn[4 + i] = reinterpret_cast<const volatile unsigned*>(p.stage.number + slot)[i];
      __threadfence();
      __syncthreads();
      if (i == 0) shared_turn[3] = launch;
    } else {
      if (threadIdx.x == 0)
        while (shared_turn[3] != launch) {}
      __syncthreads();
    }
    __threadfence();
  }
  int index = -1;
#pragma unroll
  for (int i = 0; i < kCopies; i++) index += p.first[i] <= blockIdx.x;  // uniform, and so is everything found with it
  bool here = index >= 0;
  const Copy& c = p.copies[here ? index : 0];
  i64 counts[2] = {c.size[0], c.size[2]};  // live rows and columns
  if constexpr (kStaged) {
    const volatile int* head = reinterpret_cast<volatile int*>(p.stage.turn + 4);
    due = static_cast<unsigned>(head[0]) == turn + 1;
    here = here && due;
    const int* sizes = reinterpret_cast<const int*>(p.stage.number);
    if (c.rows) counts[0] = head[reinterpret_cast<const int*>(c.rows) - sizes];
    if (c.lengths) counts[1] = head[reinterpret_cast<const int*>(c.lengths) - sizes];
    // A count below zero: this step leaves the target unchanged, including the fill.
    if (c.flags & kSkips && (c.rows ? counts[0] : counts[1]) < 0) here = false;
  } else if (here) {
    if (c.rows) counts[0] = count_at(c.rows, c.flags & kWideRows);
    if (c.lengths && !c.lengths_step) counts[1] = count_at(c.lengths, c.flags & kWideLengths);
  }
  if (here) {
    const unsigned all = gridDim.x, next = index + 1 < kCopies ? p.first[index + 1] : all;
    const unsigned blocks = (next < all ? next : all) - p.first[index];
    Work w{c, p.source[index] + slot, slot, c.size[0], c.size[2], 1, c.extent[2], c.source_stride[2], c.target_stride[2]};
    if (c.rows) w.rows = within(live(counts[0], c.rows_per, c.rows_extra), c.size[0]);
    if (c.lengths && !c.lengths_step) w.columns = within(live(counts[1], c.lengths_per, c.lengths_extra), c.size[2]);
    unsigned high = c.extent[0], wide = c.extent[2];
    if (!(c.flags & (kFill | kFillLast))) {  // nothing is read outside the covered part
      high = high < w.rows ? high : w.rows;
      wide = wide < w.columns ? wide : w.columns;
    }
    w.per_row = wide;
    int width = c.bytes;
    const bool casts = kCasts && c.target_kind != kBits;
    if (!casts && w.source_step == width && w.target_step == width) {
      const u64 bits = reinterpret_cast<u64>(w.source) | reinterpret_cast<u64>(c.target) | c.source_stride[0] |
                       c.source_stride[1] | c.target_stride[0] | c.target_stride[1] | 16;
      const int aligned = static_cast<int>(bits & (~bits + 1));
      width = aligned > width ? aligned : width;
      w.per_vector = width / c.bytes;
      w.per_row = (wide + w.per_vector - 1) / w.per_vector;
      w.source_step = w.target_step = width;
    }
    const unsigned vectors = high * c.extent[1] * w.per_row;
    const unsigned share = (vectors + blocks - 1) / blocks, begin = (blockIdx.x - p.first[index]) * share;
    const unsigned end = begin + share < vectors ? begin + share : vectors;
    if (casts) cast_units(w, begin, end);
    else if (width == 16) move_units<16>(w, begin, end);
    else if (width == 8) move_units<8>(w, begin, end);
    else if (width == 4) move_units<4>(w, begin, end);
    else if (width == 2) move_units<2>(w, begin, end);
    else move_units<1>(w, begin, end);
  }
  if constexpr (kStaged) {
    __syncthreads();  // everything that this block reads of the slot has been read
    if (threadIdx.x == 0 && atomicAdd(p.stage.turn + 1, 1) == gridDim.x - 1) {
      p.stage.turn[1] = 0;
      p.stage.turn[2] += 1;
      if (due) {
        p.stage.turn[0] = turn + 1;
        __threadfence_system();
        *p.stage.done = turn + 1;
      }
    }
  }
  release_next();
}
