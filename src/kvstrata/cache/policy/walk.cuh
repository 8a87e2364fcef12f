// Loops of a block over the tokens of a head cache: spans of indices, lists in shared memory, sums.
#pragma once

#include "plan.cuh"

struct Span {
  int first, end;
};

// Calls use(i) for the indices of both spans. With kTogether all lanes of a warp call it, those past the end with -1.
template <bool kTogether, class F> __device__ __forceinline__ void each(Span one, Span two, F use) {
#pragma unroll 1
  for (int part = 0; part < 2; part++) {
    const Span span = part ? two : one;
    if constexpr (kTogether) {
      for (int first = span.first; first < span.end; first += kThreads) {
        const int i = first + threadIdx.x;
        use(i < span.end ? i : -1);
      }
    } else {
#pragma unroll 4
      for (int i = span.first + threadIdx.x; i < span.end; i += kThreads) use(i);
    }
  }
}

// Appends the values of the lanes that have one to a list in shared memory.
__device__ __forceinline__ void append(int* list, int* size, bool has, int value) {
  const unsigned lanes = __ballot_sync(~0u, has);
  if (!lanes) return;
  const int lane = threadIdx.x & 31;
  int first = 0;
  if (lane == 0) first = atomicAdd(size, __popc(lanes));
  first = __shfl_sync(~0u, first, 0);
  if (has) list[first + __popc(lanes & ((1u << lane) - 1))] = value;
}

// Sums over the block, one after the other: three cells are used in rotation.
struct Tally {
  int* cells;
  int number = 0;

  __device__ explicit Tally(int* cells) : cells(cells) {
    if (threadIdx.x == 0) cells[0] = 0;
    __syncthreads();
  }
  __device__ int operator()(int own) {
    int* cell = cells + number % 3;
    const int sum = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(own)));
    if ((threadIdx.x & 31) == 0 && sum) atomicAdd(cell, sum);
    number++;
    if (threadIdx.x == 0) cells[number % 3] = 0;
    __syncthreads();
    return *cell;
  }
};

// Tokens with keys from `reached` up to, but not including, `past`: those of two spans, or of a list.
struct Able {
  const int* key;
  Span one, two;
  int reached, past;
  const int* list = nullptr;
  int size = 0;

  // Number of this thread's tokens with a key from `middle` on.
  __device__ __forceinline__ int count(int middle) const {
    const unsigned wide = past - middle;
    int many = 0;
    const auto holds = [&](int i) { many += static_cast<unsigned>(key[i] - middle) < wide; };
    if (list) each<false>(Span{0, size}, Span{0, 0}, [&](int i) { holds(list[i]); });
    else each<false>(one, two, holds);
    return many;
  }
  // Calls use(index, key), with index -1 for other tokens; all lanes of a warp together.
  template <class F> __device__ __forceinline__ void each_of(F use) const {
    const auto with_key = [&](int i) {
      const int own = i < 0 ? kFixed : key[i];
      use(own >= reached && own < past ? i : -1, own);
    };
    if (list) each<true>(Span{0, size}, Span{0, 0}, [&](int i) { with_key(i < 0 ? -1 : list[i]); });
    else each<true>(one, two, with_key);
  }
};
