"""``copy.cu`` as a C++ function on the CPU: its threads one after the other, under the undefined-behaviour sanitizer.

Where a compiler is at hand, this runs the kernel's own arithmetic, descriptors and protocol without a GPU. It says
nothing about races. A block runs as often as it has barriers and once more, each time one barrier further: what comes
before a barrier may be done again, and all threads have done it before any goes on.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
from pathlib import Path

from kvstrata.replay import cuda as copy_cuda

BEFORE = """
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
struct Index { unsigned x; };
static Index threadIdx, blockIdx, gridDim;
static jmp_buf thread;  // where a thread began; kernels have no destructors
static int barriers, last_barrier;  // passed by this thread; where it is to stop
static bool stopped;
inline void __syncthreads() { if (++barriers == last_barrier) { stopped = true; longjmp(thread, 1); } }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline unsigned atomicAdd(unsigned* at, int n) { unsigned old = *at; *at += n; return old; }
inline void wait_for_previous() {}
inline void release_next() {}
#if defined(__aarch64__)
typedef __fp16 half_t;
#else
typedef _Float16 half_t;
#endif
struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
inline float to_float(bf16 x) { unsigned u = (unsigned)x.bits << 16; float f; memcpy(&f, &u, 4); return f; }
inline float to_float(f16 x) { half_t h; memcpy(&h, &x.bits, 2); return (float)h; }
inline unsigned short to_half(float x) { half_t h = (half_t)x; unsigned short b; memcpy(&b, &h, 2); return b; }
inline unsigned short to_bfloat(float x) {
  unsigned b; memcpy(&b, &x, 4); return (unsigned short)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
template <int kBytes> struct Word { using type = unsigned; };
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <int kBytes> struct alignas(kBytes) Vec {
  using word = typename Word<kBytes>::type;
  static constexpr int kWords = kBytes / sizeof(word);
  word words[kWords];
};
inline void aligned(const void* at, int bytes) { if ((size_t)at % bytes) { fprintf(stderr, "misaligned\\n"); abort(); }
} template <int kBytes> Vec<kBytes> load_once(const void* from) {
  aligned(from, kBytes); Vec<kBytes> out; memcpy(&out, from, kBytes); return out;
}
template <int kBytes> void store(void* to, const Vec<kBytes>& x) { aligned(to, kBytes); memcpy(to, &x, kBytes); }
"""
AFTER = """
template <int n, bool casts, bool staged, int threads, int lanes> void go(const void* p, unsigned grid) {
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
    for (last_barrier = 1, stopped = true; stopped; last_barrier++)
      for (threadIdx.x = 0, stopped = false; threadIdx.x < threads; threadIdx.x++) {
        barriers = 0;
        if (!setjmp(thread)) copy_all<n, casts, staged, threads, lanes>(*static_cast<const Params<n>*>(p));
      }
}
template <int n> void run(const void* p, unsigned grid, int casts, int staged, int warps) {
  if (staged) go<n, false, true, 256, 256>(p, grid);
  else if (warps) casts ? go<n, true, false, 128, 32>(p, grid) : go<n, false, false, 128, 32>(p, grid);
  else casts ? go<n, true, false, 256, 256>(p, grid) : go<n, false, false, 256, 256>(p, grid);
}
extern "C" void run_8(const void* p, unsigned grid, int casts, int staged, int warps) {
  run<8>(p, grid, casts, staged, warps);
}
extern "C" void run_28(const void* p, unsigned grid, int casts, int staged, int warps) {
  run<28>(p, grid, casts, staged, warps);
}
extern "C" int size_8() { return sizeof(Params<8>); }
extern "C" int size_28() { return sizeof(Params<28>); }
"""
FLAGS = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-fno-strict-aliasing")
SANITIZER = ("-fsanitize=undefined", "-fno-sanitize-recover=undefined")


def build(folder: Path) -> ctypes.CDLL | None:
    """The compiled kernel, or None where there is no compiler that takes it."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    kernel = re.sub(r'#include ".*"', "", copy_cuda.SOURCE.read_text())
    kernel, halves = re.subn(r'asm\("cvt\.rn\.f16\.f32.*?\);', "half = to_half(real);", kernel)
    kernel, bfloats = re.subn(r'asm\("cvt\.rn\.bf16\.f32.*?\);', "half = to_bfloat(real);", kernel)
    assert (halves, bfloats) == (1, 1), "the conversions of copy.cu look different"
    source, compiled = folder / "copy.cpp", folder / "copy.so"
    source.write_text(BEFORE + kernel + AFTER)
    for flags in (FLAGS + SANITIZER, FLAGS):
        done = subprocess.run([compiler, *flags, "-o", str(compiled), str(source)], capture_output=True, text=True)
        if done.returncode == 0:
            return ctypes.CDLL(str(compiled))
    return None


class HostCopies(copy_cuda.Copies):
    """``copy_cuda.Copies`` that launches on the CPU."""

    compiled: ctypes.CDLL

    def __init__(
        self,
        count: int,
        casts: bool,
        device: object,
        stage: bytes | None = None,
        config: copy_cuda.Config | None = None,
    ) -> None:
        self.count, self.room = count, copy_cuda.capacity(count)
        self.config = config or copy_cuda.DEFAULT
        assert (self.config.worker, self.config.threads) in (("block", 256), ("warp", 128))
        self._tail_at = 8 * self.room
        params = copy_cuda.empty_params(self.room, stage)
        assert len(params) == getattr(self.compiled, f"size_{self.room}")()
        self.params = bytearray(params)
        self._view = (ctypes.c_char * len(params)).from_buffer(self.params)
        self.write = struct.Struct(f"<{count}Q").pack_into
        self.grid = 0
        self._flags = int(casts), int(stage is not None), int(self.config.worker == "warp")

    def go(self) -> None:
        run = getattr(self.compiled, f"run_{self.room}")
        run.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_int, ctypes.c_int]
        if self.grid:
            run(ctypes.addressof(self._view), self.grid, *self._flags)
