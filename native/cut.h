// The magnitude above which the k largest lie, found without sorting and without memory of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>

#include "parallel.h"

namespace thinwire {

constexpr uint32_t kInfinity = 0x7F800000u;

// Magnitudes of floats as integers of the same order; a nan counts like an infinity.
inline uint32_t magnitude(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits &= 0x7FFFFFFFu;
  return bits > kInfinity ? kInfinity : bits;
}

// The k largest are all above `least`, and the first `level` that equal it.
struct Cut {
  uint32_t least;
  int64_t level;

  bool takes(uint32_t magnitude) {
    if (magnitude > least) return true;
    return magnitude == least && level-- > 0;
  }
};

// The cut of the k largest of all magnitudes that `visit` shows to its argument; at least k of them lie in [low, high],
// and none above. Every round counts them in 2048 bins and goes on with the bin of the k-th.
template <typename Visit>
Cut find_cut(const Visit& visit, uint32_t low, uint32_t high, int64_t k) {
  constexpr int kBits = 11;
  uint32_t counts[1 << kBits];
  for (;;) {
    int shift = 0;
    while (((high - low) >> shift) >> kBits) ++shift;
    std::memset(counts, 0, sizeof counts);
    const uint32_t range = high - low;
    visit([&](uint32_t magnitude) {
      const uint32_t above = magnitude - low;
      if (above <= range) ++counts[above >> shift];
    });
    uint32_t bin = range >> shift;
    for (; bin > 0 && counts[bin] < k; --bin) k -= counts[bin];
    low += bin << shift;
    if (shift == 0 || counts[bin] == k) return {low, k};
    high = std::min(high, low + ((uint32_t{1} << shift) - 1));
  }
}

}  // namespace thinwire
