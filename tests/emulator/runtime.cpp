// What all emulated kernels share, compiled once: the fibres of a block, its meetings, its asynchronous copies, and the
// EMULATED functions of the headers.
#define EMULATOR_RUNTIME
#include <setjmp.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#include "instructions.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;
unsigned char* dynamic_shared;
unsigned dynamic_bytes;
int most_bank_ways = 0;

template void mma_16x8x16(f16, float*, const unsigned*, unsigned, unsigned);
template void mma_16x8x16(bf16, float*, const unsigned*, unsigned, unsigned);
template void multiply<f16, false>(Accumulator&, const Operand&, const Operand&);
template void multiply<bf16, false>(Accumulator&, const Operand&, const Operand&);
template void multiply<f16, true>(Accumulator&, const Operand&, const Operand&);
template void multiply<bf16, true>(Accumulator&, const Operand&, const Operand&);

namespace {

struct Meeting {  // of those who wait for each other, with room for what they bring
  int size = 0, arrived = 0;
  unsigned long long number = 0;
  uint64_t brought[2][32][8];
};

struct Block {
  std::vector<bool> done;
  std::vector<Meeting> warps;
  Meeting all, some[16];  // by the number of their barrier
  int counts[2];  // of predicates, by the meeting's number
  int current = 0;
};
Block* block;

// A thread's stack and where it waits; kept from launch to launch, and left by longjmp, which makes no system call.
struct Fibre {
  std::unique_ptr<char[]> stack;
  ucontext_t first;
  jmp_buf wait;
  bool begun = false;
};
std::vector<std::unique_ptr<Fibre>> fibres;
jmp_buf scheduler;
void (*body)();

void yield() {
  if (!_setjmp(fibres[block->current]->wait)) _longjmp(scheduler, 1);
}

void live_as_fibre() {
  for (;;) {
    body();
    block->done[block->current] = true;
    yield();
  }
}

void reserve_fibres(int threads) {
  constexpr size_t kStack = 256 << 10;
  while (fibres.size() < static_cast<size_t>(threads)) {
    auto& fibre = *fibres.emplace_back(std::make_unique<Fibre>());
    fibre.stack.reset(new char[kStack]);
    getcontext(&fibre.first);
    fibre.first.uc_stack.ss_sp = fibre.stack.get();
    fibre.first.uc_stack.ss_size = kStack;
    makecontext(&fibre.first, live_as_fibre, 0);
  }
}

void resume(Fibre& fibre) {  // until it yields
  if (_setjmp(scheduler)) return;
  if (fibre.begun) _longjmp(fibre.wait, 1);
  fibre.begun = true;
  setcontext(&fibre.first);
}

int meet(Meeting& m) {  // the half of `brought` that belongs to this meeting
  const unsigned long long number = m.number;
  if (++m.arrived == m.size) {
    m.arrived = 0;
    m.number++;
  } else {
    while (m.number == number) yield();
  }
  return number & 1;
}

Meeting& my_warp() { return block->warps[threadIdx.x >> 5]; }

struct AsyncCopy { unsigned to, group; const void* from; int bytes, there; };
struct AsyncCopies { std::vector<AsyncCopy> open; unsigned group = 0; };
std::vector<AsyncCopies> copies_of_threads;  // copies that a block leaves open end with it
AsyncCopies& my_copies() { return copies_of_threads[threadIdx.x]; }

}  // namespace

Brought exchange(const void* mine, size_t bytes) {
  Meeting& m = my_warp();
  std::memcpy(m.brought[m.number & 1][threadIdx.x & 31], mine, bytes);
  return m.brought[meet(m)];
}
void __syncwarp() { meet(my_warp()); }
void __syncthreads() { meet(block->all); }
int __syncthreads_count(int predicate) {
  Meeting& m = block->all;
  int& count = block->counts[m.number & 1];
  if (m.arrived == 0) count = 0;
  count += predicate != 0;
  meet(m);
  return count;
}
void sync_some(int number, int threads) {
  block->some[number].size = threads;
  meet(block->some[number]);
}

void copy_async(unsigned to, const void* from, int bytes, bool there) {
  if (to % bytes || reinterpret_cast<uintptr_t>(from) % bytes || to + bytes > dynamic_bytes) std::abort();
  std::memset(dynamic_shared + to, 0xff, bytes);
  my_copies().open.push_back({to, my_copies().group, from, bytes, there});
}
void commit_group() { my_copies().group++; }
void wait_for_copies(unsigned pending) {
  AsyncCopies& mine = my_copies();
  const auto comes = [&](const AsyncCopy& x) { return x.group + pending < mine.group; };
  for (size_t i = mine.open.size(); i--;) {
    const AsyncCopy& x = mine.open[i];
    if (!comes(x)) continue;
    if (x.there) std::memcpy(dynamic_shared + x.to, x.from, x.bytes);
    else std::memset(dynamic_shared + x.to, 0, x.bytes);
  }
  std::erase_if(mine.open, comes);
}

void run_blocks(void (*thread_body)(), int grid_x, int grid_y, int threads, int shared_bytes) {
  gridDim = {grid_x, grid_y, 1};
  blockDim = {threads, 1, 1};
  reserve_fibres(threads);
  body = thread_body;
  static std::vector<unsigned char> shared;
  const bool backwards = std::getenv("EMULATE_BACKWARDS");  // blocks come in any order on a GPU
  for (int y = 0; y < grid_y; y++)
    for (int at = 0; at < grid_x; at++) {
      const int x = backwards ? grid_x - 1 - at : at;
      shared.assign(shared_bytes + 1024, 0xff);
      dynamic_bytes = shared_bytes;
      dynamic_shared = shared.data() + (1024 - reinterpret_cast<uintptr_t>(shared.data()) % 1024) % 1024;
      copies_of_threads.assign(threads, {});
      Block here;
      block = &here;
      here.done.assign(threads, false);
      here.warps.resize((threads + 31) / 32);
      for (auto& warp : here.warps) warp.size = 32;
      here.all.size = threads;
      blockIdx = {x, y, 0};
      for (int left = threads, idle = 0; left;) {
        left = 0;
        for (int i = 0; i < threads; i++) {
          if (here.done[i]) continue;
          here.current = i;
          threadIdx = {i, 0, 0};
          resume(*fibres[i]);
          left += !here.done[i];
        }
        if (++idle > 50'000'000) std::abort();  // somebody waits for a lane that has gone
      }
    }
}

extern "C" int bank_ways_seen() {
  const int seen = most_bank_ways;
  return most_bank_ways = 0, seen;
}
