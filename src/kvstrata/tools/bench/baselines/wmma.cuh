// wmma m16n16k16 for the baseline that uses it: 16x16 tiles by row in shared memory, fragments opaque.
#pragma once
#include "mma.cuh"

struct Operand { unsigned x[8]; };      // fp16; bf16 uses the first four
struct Accumulator { float x[8]; };

#define KVSTRATA_WMMA_LOAD(which, layout)                                                                          \
  template <class In>                                                                                              \
  __device__ __forceinline__ void load_##which##_##layout(Operand& f, const void* from, int stride) {              \
    const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(from));                                \
    if constexpr (kIsHalf<In>)                                                                                     \
      asm volatile("wmma.load." #which ".sync.aligned." #layout                                                    \
                   ".m16n16k16.shared.f16 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],%9;"                                      \
                   : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]), "=r"(f.x[4]), "=r"(f.x[5]),           \
                     "=r"(f.x[6]), "=r"(f.x[7])                                                                    \
                   : "r"(address), "r"(stride) : "memory");                                                        \
    else                                                                                                           \
      asm volatile("wmma.load." #which ".sync.aligned." #layout ".m16n16k16.shared.bf16 {%0,%1,%2,%3},[%4],%5;"    \
                   : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3]) : "r"(address), "r"(stride) : "memory"); \
  }

template <class In> constexpr bool kIsHalf = false;
template <> constexpr bool kIsHalf<f16> = true;
KVSTRATA_WMMA_LOAD(a, row)
KVSTRATA_WMMA_LOAD(b, row)
KVSTRATA_WMMA_LOAD(b, col)
#undef KVSTRATA_WMMA_LOAD

__device__ __forceinline__ void load_sum(Accumulator& f, const float* from, int stride) {
  asm volatile("wmma.load.c.sync.aligned.row.m16n16k16.shared.f32 {%0,%1,%2,%3,%4,%5,%6,%7},[%8],%9;"
               : "=f"(f.x[0]), "=f"(f.x[1]), "=f"(f.x[2]), "=f"(f.x[3]), "=f"(f.x[4]), "=f"(f.x[5]), "=f"(f.x[6]),
                 "=f"(f.x[7])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(from))), "r"(stride)
               : "memory");
}
__device__ __forceinline__ void store_sum(float* to, const Accumulator& f, int stride) {
  asm volatile("wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%8],{%0,%1,%2,%3,%4,%5,%6,%7},%9;" ::"f"(f.x[0]),
               "f"(f.x[1]), "f"(f.x[2]), "f"(f.x[3]), "f"(f.x[4]), "f"(f.x[5]), "f"(f.x[6]), "f"(f.x[7]),
               "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "r"(stride)
               : "memory");
}

// c += a b; b as it was loaded: by row or by column.
template <class In, bool kColumns>
__device__ __forceinline__ void multiply(Accumulator& c, const Operand& a, const Operand& b) {
#define KVSTRATA_WMMA_SUMS                                                                                        \
  "+f"(c.x[0]), "+f"(c.x[1]), "+f"(c.x[2]), "+f"(c.x[3]), "+f"(c.x[4]), "+f"(c.x[5]), "+f"(c.x[6]), "+f"(c.x[7])
#define KVSTRATA_WMMA_HALF(layout)                                                                                \
  asm("wmma.mma.sync.aligned.row." layout ".m16n16k16.f32.f32 {%0,%1,%2,%3,%4,%5,%6,%7},"                         \
      "{%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19,%20,%21,%22,%23},{%0,%1,%2,%3,%4,%5,%6,%7};"              \
      : KVSTRATA_WMMA_SUMS                                                                                        \
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(a.x[4]), "r"(a.x[5]), "r"(a.x[6]), "r"(a.x[7]),   \
        "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]), "r"(b.x[4]), "r"(b.x[5]), "r"(b.x[6]), "r"(b.x[7]))
#define KVSTRATA_WMMA_BFLOAT(layout)                                                                              \
  asm("wmma.mma.sync.aligned.row." layout ".m16n16k16.f32.bf16.bf16.f32 {%0,%1,%2,%3,%4,%5,%6,%7},"               \
      "{%8,%9,%10,%11},{%12,%13,%14,%15},{%0,%1,%2,%3,%4,%5,%6,%7};"                                              \
      : KVSTRATA_WMMA_SUMS                                                                                        \
      : "r"(a.x[0]), "r"(a.x[1]), "r"(a.x[2]), "r"(a.x[3]), "r"(b.x[0]), "r"(b.x[1]), "r"(b.x[2]), "r"(b.x[3]))
  if constexpr (kIsHalf<In> && kColumns) KVSTRATA_WMMA_HALF("col");
  else if constexpr (kIsHalf<In>) KVSTRATA_WMMA_HALF("row");
  else if constexpr (kColumns) KVSTRATA_WMMA_BFLOAT("col");
  else KVSTRATA_WMMA_BFLOAT("row");
#undef KVSTRATA_WMMA_SUMS
#undef KVSTRATA_WMMA_HALF
#undef KVSTRATA_WMMA_BFLOAT
}
