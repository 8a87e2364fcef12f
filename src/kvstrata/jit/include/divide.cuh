// Division by a number that the host knows: a multiplication instead of the thirty instructions of a division.
#pragma once

// x / d for 0 <= x < 2^32 / d; `inverse` is 2^32 / d, rounded up.
__device__ __forceinline__ int divide(int x, unsigned long long inverse) {
  return static_cast<int>(static_cast<unsigned long long>(static_cast<unsigned>(x)) * inverse >> 32);
}
