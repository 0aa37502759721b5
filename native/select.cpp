// Exact top-k by magnitude; ties go to the lower index, a nan counts like an infinity. Indices have 32 bits. Candidates lie
// in memory that the caller gives; a search without them takes a sample first, which is allocated.

#include <cmath>
#include <cstring>
#include <functional>

#include "cut.h"
#include "listing.h"
#include "parallel.h"

namespace {

using thinwire::Cut;
using thinwire::kInfinity;
using thinwire::magnitude;

constexpr int kBuckets = 2048;  // of the 31 magnitude bits: the exponent and three bits more
constexpr int kShift = 20;

THINWIRE_CLONES
int any_at_least(const float* x, int64_t n, uint32_t least) {
  int hit = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    hit |= (bits & 0x7FFFFFFFu) >= least;
  }
  return hit;
}

THINWIRE_CLONES
void range_of(const uint32_t* x, int64_t n, uint32_t* low, uint32_t* high) {
  uint32_t least = x[0], most = x[0];
  for (int64_t i = 0; i < n; ++i) {
    least = x[i] < least ? x[i] : least;
    most = x[i] > most ? x[i] : most;
  }
  *low = least;
  *high = most;
}

// The cut of the k largest of n magnitudes, 1 <= k <= n.
Cut cut_of(const uint32_t* magnitudes, int64_t n, int64_t k) {
  constexpr int64_t kFew = 512;
  if (n <= kFew) {
    uint32_t sorted[kFew];
    std::memcpy(sorted, magnitudes, static_cast<size_t>(n) * sizeof(uint32_t));
    std::nth_element(sorted, sorted + (k - 1), sorted + n, std::greater<uint32_t>());
    const uint32_t least = sorted[k - 1];
    int64_t above = 0;
    for (int64_t i = 0; i < k; ++i) above += sorted[i] > least;
    return {least, k - above};
  }
  uint32_t low, high;
  range_of(magnitudes, n, &low, &high);
  return thinwire::find_cut(
      [&](auto&& see) {
        for (int64_t i = 0; i < n; ++i) see(magnitudes[i]);
      },
      low, high, k);
}

// The k best, or all where they are fewer, of listed candidates: rising places in x, which are written rising from
// `start` on; and the smallest chosen magnitude. `magnitudes` has room for one a candidate.
int64_t among(const float* x, const uint32_t* candidates, int64_t count, int64_t k, uint32_t* magnitudes, uint32_t start,
              uint32_t* out, float* smallest) {
  constexpr int64_t kAhead = 16;
  *smallest = 0.0f;
  if (count == 0) return 0;
  for (int64_t i = 0; i < count; ++i) {
    __builtin_prefetch(x + candidates[i + kAhead < count ? i + kAhead : i]);
    magnitudes[i] = magnitude(x[candidates[i]]);
  }
  k = std::min(k, count);
  Cut cut = k < count ? cut_of(magnitudes, count, k) : Cut{0, count};
  uint32_t least = kInfinity;
  int64_t chosen = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!cut.takes(magnitudes[i])) continue;
    least = std::min(least, magnitudes[i]);
    out[chosen++] = start + candidates[i];
  }
  std::memcpy(smallest, &least, 4);
  return chosen;
}

// The places of all elements whose magnitude bits are at least `least`, rising, in `places`; -1 when they are more than
// that, or `room` which is as long, holds.
int64_t collect(const float* x, int64_t n, uint32_t least, uint32_t* room, uint32_t* places, int64_t entries, int threads) {
  constexpr int64_t kLook = 128;
  thinwire::Listing listing(room, entries, threads);
  thinwire::parallel(n, threads, 1, [&](int part, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end && !listing.full(); i += kLook) {
      const int64_t stop = std::min(end, i + kLook);
      if (!any_at_least(x + i, stop - i, least)) continue;
      uint32_t found[kLook + 1];  // one is written ahead of what counts
      int64_t count = 0;
      for (int64_t j = i; j < stop; ++j) {
        found[count] = static_cast<uint32_t>(j);
        count += magnitude(x[j]) >= least;
      }
      listing.append(part, found, count);
    }
  });
  return listing.gather(places, entries);
}

// Magnitude bits that a few more than k elements should reach, from every so manieth element.
uint32_t sampled_threshold(const float* x, int64_t n, int64_t k) {
  int64_t wanted = std::max<int64_t>(1 << 14, 64 * (n / k)), stride = std::max<int64_t>(1, n / wanted);
  std::vector<uint32_t> sample;
  sample.reserve(n / stride + 1);
  for (int64_t i = 0; i < n; i += stride) sample.push_back(magnitude(x[i]));
  double hits = static_cast<double>(sample.size()) * static_cast<double>(k) / static_cast<double>(n);
  int64_t rank = std::min<int64_t>(sample.size() - 1, static_cast<int64_t>(hits + 4 * std::sqrt(hits) + 4));
  std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<uint32_t>());
  return sample[rank];
}

// The magnitude bits at which the bucket of the k-th largest begins, and how many elements reach them.
uint32_t bucket_threshold(const float* x, int64_t n, int64_t k, int64_t* reach, int threads) {
  std::vector<std::vector<int64_t>> histograms(std::max(1, threads));
  thinwire::parallel(n, threads, 1, [&](int part, int64_t begin, int64_t end) {
    // Four tables in turn: equal neighbours would otherwise wait for each other's increment.
    std::vector<int32_t> counts(4 * kBuckets, 0);
    for (int64_t i = begin; i < end; ++i) ++counts[(i & 3) * kBuckets + (magnitude(x[i]) >> kShift)];
    histograms[part].resize(kBuckets);
    for (int b = 0; b < kBuckets; ++b)
      histograms[part][b] = static_cast<int64_t>(counts[b]) + counts[kBuckets + b] + counts[2 * kBuckets + b] +
                            counts[3 * kBuckets + b];
  });
  int64_t above = 0;
  int bucket = kBuckets - 1;
  for (;; --bucket) {
    for (const auto& h : histograms)
      if (!h.empty()) above += h[bucket];
    if (above >= k || bucket == 0) break;
  }
  *reach = above;
  return static_cast<uint32_t>(bucket) << kShift;
}

// The k best of all n elements, without any list of candidates: for vectors in which very many are about equally large.
void by_counting(const float* x, int64_t n, int64_t k, uint32_t least, uint32_t start, uint32_t* out, float* smallest) {
  Cut cut = thinwire::find_cut(
      [&](auto&& see) {
        for (int64_t i = 0; i < n; ++i) see(magnitude(x[i]));
      },
      least, kInfinity, k);
  uint32_t lowest = kInfinity;
  for (int64_t i = 0, chosen = 0; i < n && chosen < k; ++i) {
    const uint32_t here = magnitude(x[i]);
    if (!cut.takes(here)) continue;
    lowest = std::min(lowest, here);
    out[chosen++] = start + static_cast<uint32_t>(i);
  }
  std::memcpy(smallest, &lowest, 4);
}

// The k best of all n < 2**32 elements, 0 < k < n. A sample says above which magnitude to look, and when at least k are
// found there they hold the k best; otherwise a histogram of all magnitudes finds the bucket of the k-th, and one more pass
// collects that bucket and everything above it.
void select_all(const float* x, int64_t n, int64_t k, uint32_t* scratch, int64_t entries, uint32_t start, uint32_t* out,
                float* smallest, int threads) {
  const int64_t half = entries / 2;
  uint32_t *places = scratch + half, *magnitudes = scratch;  // magnitudes overwrite what places were collected in
  if (n >= thinwire::kSerialBelow && k <= n / 16) {
    const int64_t found = collect(x, n, sampled_threshold(x, n, k), scratch, places, half, threads);
    if (found >= k) {
      among(x, places, found, k, magnitudes, start, out, smallest);
      return;
    }
  }
  int64_t reach = 0;
  const uint32_t least = bucket_threshold(x, n, k, &reach, threads);
  const int64_t found = reach <= half ? collect(x, n, least, scratch, places, half, threads) : -1;
  if (found >= k)
    among(x, places, found, k, magnitudes, start, out, smallest);
  else
    by_counting(x, n, k, least, start, out, smallest);
}

// Magnitude bits that at least k <= kStripes of n elements reach, n a multiple of kStripes: the k-th largest of the
// stripes' largest, because each of those k is an element.
constexpr int64_t kStripes = 512;

THINWIRE_CLONES
uint32_t reached_by(const uint32_t* __restrict magnitudes, int64_t n, int64_t k) {
  uint32_t largest[kStripes];
  std::memcpy(largest, magnitudes, sizeof largest);
  for (int64_t row = kStripes; row < n; row += kStripes)
    for (int64_t i = 0; i < kStripes; ++i) largest[i] = std::max(largest[i], magnitudes[row + i]);
  std::nth_element(largest, largest + (k - 1), largest + kStripes, std::greater<uint32_t>());
  return largest[k - 1];
}

THINWIRE_CLONES
void magnitudes_of(const float* __restrict x, int64_t n, uint32_t* __restrict magnitudes) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    magnitudes[i] = std::min(bits & 0x7FFFFFFFu, kInfinity);
  }
}

// Lists what reaches `least`: its places, counted from `start`, and its magnitudes.
THINWIRE_CLONES
int64_t list_reaching(const uint32_t* __restrict magnitudes, int64_t n, uint32_t least, uint32_t start,
                      uint32_t* __restrict places, uint32_t* __restrict found) {
  constexpr int64_t kLook = 16;
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kLook) {
    const int64_t stop = std::min(i + kLook, n);
    if (stop - i == kLook) {
      uint32_t most = 0;
      for (int64_t j = 0; j < kLook; ++j) most = std::max(most, magnitudes[i + j]);
      if (most < least) continue;
    }
    for (int64_t j = i; j < stop; ++j) {
      places[count] = start + static_cast<uint32_t>(j);
      found[count] = magnitudes[j];
      count += magnitudes[j] >= least;
    }
  }
  return count;
}

// The k best of all n elements of a chunk, 0 <= k <= n; `room` has three entries an element.
void select_chunk(const float* x, int64_t n, int64_t k, uint32_t* room, uint32_t start, uint32_t* out) {
  if (k == 0) return;
  uint32_t *magnitudes = room, *places = room + n, *found = room + 2 * n;
  magnitudes_of(x, n, magnitudes);
  const uint32_t least = n % kStripes == 0 && k <= kStripes ? reached_by(magnitudes, n, k) : 0;
  const int64_t count = list_reaching(magnitudes, n, least, start, places, found);
  Cut cut = k < count ? cut_of(found, count, k) : Cut{0, count};
  for (int64_t i = 0; i < count; ++i)
    if (cut.takes(found[i])) *out++ = places[i];
}

}  // namespace

// The k best of every `chunk` elements of each scope x[bounds[s], bounds[s + 1]), and the lasts[s] best of the fewer that
// are left; one chunk behind the other, rising.
THINWIRE_API void tw_select_chunks(const float* x, int64_t num_scopes, const int64_t* bounds, int64_t chunk, int64_t k,
                                   const int64_t* lasts, uint32_t* out, int threads) {
  for (int64_t s = 0; s < num_scopes; ++s) {
    const int64_t n = bounds[s + 1] - bounds[s], whole = n - n % chunk;
    thinwire::parallel(n, threads, chunk, [&](int, int64_t begin, int64_t end) {
      std::vector<uint32_t> room(3 * static_cast<size_t>(std::min(chunk, n)));
      for (int64_t i = begin; i < end; i += chunk) {
        const int64_t count = std::min(chunk, n - i), first = bounds[s] + i;
        select_chunk(x + first, count, i < whole ? k : lasts[s], room.data(), static_cast<uint32_t>(first),
                     out + i / chunk * k);
      }
    });
    out += whole / chunk * k + lasts[s];
  }
}

// The indices of the k best of n < 2**32 elements, 0 < k < n. `scratch` may have any number of entries; a few times k, and
// 512 a thread, are what makes it fast.
THINWIRE_API void tw_select_topk(const float* x, int64_t n, int64_t k, uint32_t* scratch, int64_t entries, uint32_t* out,
                                 float* smallest, int threads) {
  select_all(x, n, k, scratch, entries, 0, out, smallest, threads);
}

// The ks[s] best of every scope x[bounds[s], bounds[s + 1]): among the listed candidates where they are enough, else among
// all. `candidates` are rising indices of everything that reaches a scope's threshold; a null pointer says there are none.
// `scratch` has at least one entry a candidate. Writes the chosen indices one scope behind the other, rising; how many
// candidates each scope had; and each scope's smallest chosen magnitude.
THINWIRE_API void tw_select_scopes(const float* x, int64_t num_scopes, const int64_t* bounds, const int64_t* ks,
                                   const uint32_t* candidates, int64_t count, uint32_t* scratch, int64_t entries,
                                   uint32_t* out, int64_t* passed, float* smallest, int threads) {
  const uint32_t* at = candidates;
  for (int64_t s = 0; s < num_scopes; ++s) {
    const int64_t begin = bounds[s], n = bounds[s + 1] - begin, k = std::min(ks[s], n);
    const uint32_t* end = candidates ? std::lower_bound(at, candidates + count, begin + n) : nullptr;
    passed[s] = candidates ? end - at : 0;
    smallest[s] = 0.0f;
    if (k > 0 && candidates && passed[s] >= k) {
      among(x, at, passed[s], k, scratch, 0, out, smallest + s);
    } else if (k > 0 && k < n) {
      select_all(x + begin, n, k, scratch, entries, static_cast<uint32_t>(begin), out, smallest + s, threads);
    } else if (k > 0) {
      uint32_t least = kInfinity;
      for (int64_t i = 0; i < n; ++i) {
        out[i] = static_cast<uint32_t>(begin + i);
        least = std::min(least, magnitude(x[begin + i]));
      }
      std::memcpy(smallest + s, &least, 4);
    }
    at = end;
    out += k;
  }
}
