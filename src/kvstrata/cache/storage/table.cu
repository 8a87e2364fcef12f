// Table updates of a decode step, each one launch: counts and lengths are incremented, buckets get new pages. Pages that
// requests get ahead of need are passed as parameters, so nothing is uploaded.
#include "page.cuh"

struct Params {
  int* count;           // [requests, layers, heads, tiers]
  int* length;          // [requests, layers]
  int* table;           // flat page table
  const i64* pointers;  // [slabs]
  const int* requests;  // [grid]
  const i64* entries;   // [2, pages]: index into the table, handle
  int layers, heads, tiers, units;
  int pages, vectors;  // new pages, 16-byte vectors in one
};

// A block counts one more plain token of a request in every layer.
extern "C" __global__ void __launch_bounds__(256) count_up(const __grid_constant__ Params p) {
  const i64 request = p.requests[blockIdx.x];
  const int buckets = p.layers * p.heads;
  int* count = p.count + request * buckets * p.tiers;
  for (int i = threadIdx.x; i < buckets; i += blockDim.x) count[static_cast<i64>(i) * p.tiers] += 1;
  for (int i = threadIdx.x; i < p.layers; i += blockDim.x) p.length[request * p.layers + i] += 1;
}

// Zeroes plain pages and enters them in the table; a block processes one after the other.
extern "C" __global__ void __launch_bounds__(256) new_pages(const __grid_constant__ Params p) {
  for (i64 number = blockIdx.x; number < p.pages; number += gridDim.x) {
    const int handle = static_cast<int>(p.entries[p.pages + number]);
    int4* page = reinterpret_cast<int4*>(page_address(p.pointers, p.units, handle));
    for (int i = threadIdx.x; i < p.vectors; i += blockDim.x) page[i] = int4{0, 0, 0, 0};
    if (threadIdx.x == 0) p.table[p.entries[number]] = handle;
  }
}

constexpr int kRequests = 16, kPages = 4096;  // REQUESTS, PAGES of table_cuda.py; parameters may have 32 KB since CUDA 12.1

struct Next {
  int* table;           // flat page table
  const i64* pointers;  // [slabs]
  int requests, buckets, list, units, vectors, unused;  // buckets of a request, handles from one plain list to the next
  int request[kRequests], page[kRequests];
  int handle[kPages];  // [requests, buckets]
};

// Zeroes a plain page for each bucket of a few requests and enters it, at the same index of all lists of a request.
extern "C" __global__ void __launch_bounds__(256) next_pages(const __grid_constant__ Next p) {
  for (int number = blockIdx.x; number < p.requests * p.buckets; number += gridDim.x) {
    const int row = number / p.buckets, handle = p.handle[number];
    int4* page = reinterpret_cast<int4*>(page_address(p.pointers, p.units, handle));
    for (int i = threadIdx.x; i < p.vectors; i += blockDim.x) page[i] = int4{0, 0, 0, 0};
    const i64 bucket = static_cast<i64>(p.request[row]) * p.buckets + number % p.buckets;
    if (threadIdx.x == 0) p.table[bucket * p.list + p.page[row]] = handle;
  }
}
