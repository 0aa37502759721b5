// The 32-bit finaliser behind the random numbers and the checksum.
#pragma once

#include <cstdint>

namespace thinwire {

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

}  // namespace thinwire
