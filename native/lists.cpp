// Rising lists of 32-bit indices with values: reading and changing a vector there, their union, and parts of them.

#include <cmath>
#include <cstring>

#include "cut.h"
#include "parallel.h"

namespace {

using thinwire::Cut;
using thinwire::kInfinity;
using thinwire::magnitude;

constexpr int64_t kAhead = 16;  // entries lie far apart: their cache lines are asked for before they are needed

inline int64_t ahead(int64_t i, int64_t count) { return i + kAhead < count ? i + kAhead : i; }

// Shows the union of two rising lists, entry by entry: values of an index that both have are added.
template <typename See>
int64_t each_of_union(const uint32_t* a, const float* a_values, int64_t a_count, const uint32_t* b, const float* b_values,
                      int64_t b_count, const See& see) {
  int64_t i = 0, j = 0, n = 0;
  while (i < a_count && j < b_count) {
    uint32_t left = a[i], right = b[j];
    bool from_a = left <= right, from_b = right <= left;
    float sum = 0.0f;  // the reference adds to zero: minus zero alone becomes zero
    if (from_a) sum += a_values[i];
    if (from_b) sum += b_values[j];
    see(n++, from_a ? left : right, sum);
    i += from_a;
    j += from_b;
  }
  for (; i < a_count; ++i) see(n++, a[i], 0.0f + a_values[i]);
  for (; j < b_count; ++j) see(n++, b[j], 0.0f + b_values[j]);
  return n;
}

}  // namespace

// x[index] -= value. A difference that is not finite leaves x where that is finite, and zero elsewhere.
THINWIRE_API void tw_subtract_at(float* x, const uint32_t* indices, const float* values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    __builtin_prefetch(x + indices[ahead(i, count)], 1);
    float before = x[indices[i]], rest = before - values[i];
    x[indices[i]] = std::isfinite(rest) ? rest : std::isfinite(before) ? before : 0.0f;
  }
}

THINWIRE_API void tw_zero_at(float* x, const uint32_t* indices, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    __builtin_prefetch(x + indices[ahead(i, count)], 1);
    x[indices[i]] = 0.0f;
  }
}

THINWIRE_API void tw_take_at(const float* x, const uint32_t* indices, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    __builtin_prefetch(x + indices[ahead(i, count)]);
    out[i] = x[indices[i]];
  }
}

// The union of two rising lists; values of an index that both have are added. Returns its length; `out` and `sums` have
// room for all entries of both.
THINWIRE_API int64_t tw_union_add(const uint32_t* a, const float* a_values, int64_t a_count, const uint32_t* b,
                                  const float* b_values, int64_t b_count, uint32_t* out, float* sums) {
  return each_of_union(a, a_values, a_count, b, b_values, b_count, [&](int64_t n, uint32_t index, float sum) {
    out[n] = index;
    sums[n] = sum;
  });
}

// The k entries of largest magnitude of that union; ties go to the lower index. Returns their number. `scratch` has an entry
// for each of both lists; it may be the memory of `out` and `sums`, which are written after the last look at it.
THINWIRE_API int64_t tw_merge_topk(const uint32_t* a, const float* a_values, int64_t a_count, const uint32_t* b,
                                   const float* b_values, int64_t b_count, int64_t k, uint32_t* scratch, uint32_t* out,
                                   float* sums) {
  const int64_t all = each_of_union(a, a_values, a_count, b, b_values, b_count,
                                    [&](int64_t n, uint32_t, float sum) { scratch[n] = magnitude(sum); });
  if (k == 0) return 0;
  Cut cut{0, all};
  if (k < all)
    cut = thinwire::find_cut(
        [&](auto&& see) {
          for (int64_t i = 0; i < all; ++i) see(scratch[i]);
        },
        0, kInfinity, k);
  int64_t chosen = 0;
  each_of_union(a, a_values, a_count, b, b_values, b_count, [&](int64_t, uint32_t index, float sum) {
    if (!cut.takes(magnitude(sum))) return;
    out[chosen] = index;
    sums[chosen++] = sum;
  });
  return chosen;
}

// The k < count entries of largest magnitude; ties go to the lower index.
THINWIRE_API void tw_keep_largest(const uint32_t* indices, const float* values, int64_t count, int64_t k, uint32_t* out,
                                  float* kept) {
  if (k == 0) return;
  Cut cut = thinwire::find_cut(
      [&](auto&& see) {
        for (int64_t i = 0; i < count; ++i) see(magnitude(values[i]));
      },
      0, kInfinity, k);
  for (int64_t i = 0; i < count; ++i) {
    if (!cut.takes(magnitude(values[i]))) continue;
    *out++ = indices[i];
    *kept++ = values[i];
  }
}

// The entries that the mask (0 or 1 each) names; returns their number.
THINWIRE_API int64_t tw_keep_masked(const uint32_t* indices, const float* values, const uint8_t* mask, int64_t count,
                                    uint32_t* out, float* kept) {
  int64_t n = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!mask[i]) continue;
    out[n] = indices[i];
    kept[n++] = values[i];
  }
  return n;
}

// Clears the mask of those of the rising `wanted` that are not among the rising `indices`.
THINWIRE_API void tw_mask_contained(const uint32_t* wanted, int64_t wanted_count, const uint32_t* indices, int64_t count,
                                    uint8_t* mask) {
  int64_t j = 0;
  for (int64_t i = 0; i < wanted_count; ++i) {
    while (j < count && indices[j] < wanted[i]) ++j;
    mask[i] &= j < count && indices[j] == wanted[i];
  }
}
