// Rising lists of indices with values: what is left behind them, their union, and which of one are in another.

#include <cmath>
#include <cstring>

#include "parallel.h"

// x[index] -= value. A difference that is not finite leaves x where that is finite, and zero elsewhere.
THINWIRE_API void tw_subtract_at(float* x, const int64_t* indices, const float* values, int64_t count) {
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < count; ++i) {
    __builtin_prefetch(x + indices[i + kAhead < count ? i + kAhead : i], 1);
    float before = x[indices[i]], rest = before - values[i];
    x[indices[i]] = std::isfinite(rest) ? rest : std::isfinite(before) ? before : 0.0f;
  }
}

// out = x[indices].
THINWIRE_API void tw_take(const float* x, const int64_t* indices, int64_t count, float* out) {
  constexpr int64_t kAhead = 16;
  for (int64_t i = 0; i < count; ++i) {
    __builtin_prefetch(x + indices[i + kAhead < count ? i + kAhead : i]);
    out[i] = x[indices[i]];
  }
}

// The union of two rising lists; values of an index that both have are added. Returns its length; `out` and `sums` have
// room for all entries of both.
THINWIRE_API int64_t tw_union_add(const int64_t* a, const float* a_values, int64_t a_count, const int64_t* b,
                                  const float* b_values, int64_t b_count, int64_t* out, float* sums) {
  int64_t i = 0, j = 0, n = 0;
  while (i < a_count && j < b_count) {
    int64_t left = a[i], right = b[j];
    bool from_a = left <= right, from_b = right <= left;
    float sum = 0.0f;  // the reference adds to zero: minus zero alone becomes zero
    if (from_a) sum += a_values[i];
    if (from_b) sum += b_values[j];
    out[n] = from_a ? left : right;
    sums[n++] = sum;
    i += from_a;
    j += from_b;
  }
  for (; i < a_count; ++i, ++n) out[n] = a[i], sums[n] = 0.0f + a_values[i];
  for (; j < b_count; ++j, ++n) out[n] = b[j], sums[n] = 0.0f + b_values[j];
  return n;
}

// Which of the rising `wanted` are among the rising `indices`: 0 or 1 each.
THINWIRE_API void tw_contained(const int64_t* wanted, int64_t wanted_count, const int64_t* indices, int64_t count,
                               uint8_t* out) {
  int64_t j = 0;
  for (int64_t i = 0; i < wanted_count; ++i) {
    while (j < count && indices[j] < wanted[i]) ++j;
    out[i] = j < count && indices[j] == wanted[i];
  }
}
