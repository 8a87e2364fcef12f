// Begins a step of observe.py: selects the layers that give mass, and sets and reports the number of queries per row.
#include "pdl.cuh"

constexpr int kThreads = 1024, kMost = 1 << 30;  // MOST of cache/policy/reports.py

struct Params {
  int* state;           // [2]: steps so far, and 1 if pages are shared
  int2* reports;        // [requests, layers]: queries, length at the last report
  const int* lengths;   // [requests, layers]
  const int* requests;  // [rows]
  const int* live;      // [rows], or null: a row that does not name its request gives no mass
  int* weights;         // [layers, rows + 1]; last, 1 if any row gives mass
  int rows, layers, each, turns, most;
  int unused;
};

// One block: the step is read by all threads before one of them counts it.
extern "C" __global__ void __launch_bounds__(kThreads) observe(const __grid_constant__ Params p) {
  wait_for_previous();
  release_next();
  const int turn = static_cast<unsigned>(p.state[0]) % static_cast<unsigned>(p.turns), all = p.layers * (p.rows + 1);
  __syncthreads();
  if (threadIdx.x == 0) p.state[0] = static_cast<int>(static_cast<unsigned>(p.state[0]) + 1u);
  for (int i = threadIdx.x; i < all; i += kThreads) {
    const int layer = i / (p.rows + 1), row = i % (p.rows + 1);
    int weight = 0;
    if (row < p.rows && layer / p.each == turn && (!p.live || p.live[row] == p.requests[row])) {
      const int index = p.requests[row] * p.layers + layer, length = p.lengths[index];
      const int2 before = p.reports[index];
      weight = min(max(length - before.y, 0), p.most);
      if (weight) p.reports[index] = make_int2(min(before.x + weight, kMost), length);
    }
    p.weights[i] = weight;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < all; i += kThreads) {
    const int layer = i / (p.rows + 1), row = i % (p.rows + 1);
    if (row < p.rows && p.weights[i]) p.weights[layer * (p.rows + 1) + p.rows] = 1;
  }
}
