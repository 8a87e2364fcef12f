// A run of 1 to 64 bytes that moves between global memory and registers in the widest accesses its size allows.
//
// Wide loads bypass L1: every byte is read once. They are volatile, so they stay behind a griddepcontrol.wait. Stores
// keep the default write-back policy, since attention reads the data next.
#pragma once

template <int kBytes> struct Word { using type = unsigned; };
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };

template <int kBytes>
struct alignas(kBytes < 16 ? kBytes : 16) Vec {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes % 16 == 0, "no such access width");
  using word = typename Word<kBytes>::type;
  static constexpr int kWords = kBytes / sizeof(word);
  word words[kWords];
};

template <int kBytes>
__device__ __forceinline__ Vec<kBytes> load_once(const void* from) {
  Vec<kBytes> out;
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 4; i += 4)
      asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
          : "=r"(out.words[i]), "=r"(out.words[i + 1]), "=r"(out.words[i + 2]), "=r"(out.words[i + 3])
          : "l"(static_cast<const unsigned*>(from) + i));
  } else if constexpr (kBytes == 8) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(out.words[0]), "=r"(out.words[1]) : "l"(from));
  } else if constexpr (kBytes == 4) {
    asm volatile("ld.global.L1::no_allocate.u32 %0,[%1];" : "=r"(out.words[0]) : "l"(from));
  } else {
    out.words[0] = *static_cast<const volatile typename Vec<kBytes>::word*>(from);
  }
  return out;
}

template <int kBytes>
__device__ __forceinline__ void store(void* to, const Vec<kBytes>& value) {
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; i++)
      static_cast<uint4*>(to)[i] =
          make_uint4(value.words[4 * i], value.words[4 * i + 1], value.words[4 * i + 2], value.words[4 * i + 3]);
  } else if constexpr (kBytes == 8) {
    *static_cast<uint2*>(to) = make_uint2(value.words[0], value.words[1]);
  } else {
    *static_cast<typename Vec<kBytes>::word*>(to) = value.words[0];
  }
}
