// Exact top-k by magnitude; ties go to the lower index, a nan counts like an infinity.

#include <cmath>
#include <cstring>
#include <functional>

#include "parallel.h"

namespace {

constexpr uint32_t kInfinity = 0x7F800000u;
constexpr int kBuckets = 2048;  // of the 31 magnitude bits: the exponent and three bits more
constexpr int kShift = 20;

inline uint32_t magnitude(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits &= 0x7FFFFFFFu;
  return bits > kInfinity ? kInfinity : bits;
}

// Smaller keys come first: large magnitude, then low index.
inline uint64_t key_of(float x, int64_t index) {
  return (static_cast<uint64_t>(~magnitude(x)) << 32) | static_cast<uint64_t>(index);
}

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

// The k-th smallest of some keys, which are all different. A table over the range of their magnitudes says in which
// narrow stretch it lies, and only the keys of that stretch are put into order.
uint64_t kth_of(const std::vector<uint64_t>& keys, int64_t k) {
  constexpr int kBits = 12;
  constexpr size_t kFew = 4096;
  std::vector<uint64_t> order;
  if (keys.size() < kFew) {
    order = keys;
  } else {
    uint64_t low = keys[0], high = keys[0];
    for (uint64_t key : keys) low = std::min(low, key), high = std::max(high, key);
    int shift = 32;
    while (((high - low) >> shift) >> kBits) ++shift;
    std::vector<int64_t> counts(size_t{1} << kBits, 0);
    for (uint64_t key : keys) ++counts[(key - low) >> shift];
    uint64_t stretch = 0;
    for (; k > counts[stretch]; ++stretch) k -= counts[stretch];
    order.reserve(counts[stretch]);
    for (uint64_t key : keys)
      if ((key - low) >> shift == stretch) order.push_back(key);
  }
  std::nth_element(order.begin(), order.begin() + (k - 1), order.end());
  return order[k - 1];
}

// The indices of the k smallest of some keys, which are all different and given by rising index: written rising, too.
int64_t best_of(const std::vector<uint64_t>& keys, int64_t k, int64_t* out, float* smallest) {
  uint64_t last = 0;
  if (k < static_cast<int64_t>(keys.size())) {
    last = kth_of(keys, k);
  } else {
    for (uint64_t key : keys) last = std::max(last, key);
  }
  int64_t count = 0;
  for (uint64_t key : keys) {
    out[count] = static_cast<int64_t>(key & 0xFFFFFFFFu);
    count += key <= last;
    if (count == k) break;
  }
  uint32_t bits = ~static_cast<uint32_t>(last >> 32);
  std::memcpy(smallest, &bits, 4);
  return count;
}

}  // namespace

namespace {

// The k best of listed candidates (rising indices into x); writes them rising, and the smallest chosen magnitude.
int64_t among(const float* x, const int64_t* candidates, int64_t count, int64_t k, int64_t* out, float* smallest) {
  constexpr int64_t kAhead = 16;  // candidates lie far apart: their cache lines are asked for before they are needed
  std::vector<uint64_t> keys(count);
  for (int64_t i = 0; i < count; ++i) {
    __builtin_prefetch(x + candidates[i + kAhead < count ? i + kAhead : i]);
    keys[i] = key_of(x[candidates[i]], candidates[i]);
  }
  if (count == 0) {
    *smallest = 0.0f;
    return 0;
  }
  return best_of(keys, std::min(k, count), out, smallest);
}

}  // namespace

namespace {

// Keys of all elements whose magnitude bits are at least `least`, in rising order; false when they are more than `most`.
bool collect(const float* x, int64_t n, uint32_t least, int64_t most, std::vector<uint64_t>& keys, int threads) {
  std::vector<std::vector<uint64_t>> lists(std::max(1, threads));
  thinwire::parallel(n, threads, 1, [&](int part, int64_t begin, int64_t end) {
    auto& list = lists[part];
    for (int64_t i = begin; i < end && static_cast<int64_t>(list.size()) <= most; i += 128) {
      int64_t stop = std::min(end, i + 128);
      if (!any_at_least(x + i, stop - i, least)) continue;
      for (int64_t j = i; j < stop; ++j)
        if (magnitude(x[j]) >= least) list.push_back(key_of(x[j], j));
    }
  });
  keys.clear();
  for (const auto& list : lists) keys.insert(keys.end(), list.begin(), list.end());
  return static_cast<int64_t>(keys.size()) <= most;
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

// The magnitude bits at which the bucket of the k-th largest begins.
uint32_t bucket_threshold(const float* x, int64_t n, int64_t k, int threads) {
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
  for (; bucket > 0; --bucket) {
    for (const auto& h : histograms)
      if (!h.empty()) above += h[bucket];
    if (above >= k) break;
  }
  return static_cast<uint32_t>(bucket) << kShift;
}

}  // namespace

// The k best of all n < 2**32 elements. A sample says above which magnitude to look, and when at least k are found there
// they hold the k best; otherwise a histogram of all magnitudes finds the bucket of the k-th, and one more pass collects
// that bucket and everything above it.
THINWIRE_API void tw_select_topk(const float* x, int64_t n, int64_t k, int64_t* out, float* smallest, int threads) {
  std::vector<uint64_t> keys;
  bool found = n >= thinwire::kSerialBelow && k <= n / 16 &&
               collect(x, n, sampled_threshold(x, n, k), 4 * k + 4096, keys, threads) &&
               static_cast<int64_t>(keys.size()) >= k;
  if (!found) collect(x, n, bucket_threshold(x, n, k, threads), n, keys, threads);
  best_of(keys, k, out, smallest);
}

// The ks[s] best of every scope x[bounds[s], bounds[s + 1]): among the listed candidates where they are enough, else among
// all. `candidates` are rising indices of everything that reaches a scope's threshold; a null pointer says there are none.
// Writes the chosen indices one scope behind the other, rising; how many candidates each scope had; and each scope's
// smallest chosen magnitude.
THINWIRE_API void tw_select_scopes(const float* x, int64_t num_scopes, const int64_t* bounds, const int64_t* ks,
                                   const int64_t* candidates, int64_t count, int64_t* out, int64_t* passed,
                                   float* smallest, int threads) {
  const int64_t* at = candidates;
  for (int64_t s = 0; s < num_scopes; ++s) {
    const int64_t begin = bounds[s], n = bounds[s + 1] - begin, k = std::min(ks[s], n);
    const int64_t* end = candidates ? std::lower_bound(at, candidates + count, begin + n) : nullptr;
    passed[s] = candidates ? end - at : 0;
    smallest[s] = 0.0f;
    if (k > 0 && candidates && passed[s] >= k) {
      among(x, at, passed[s], k, out, smallest + s);
    } else if (k > 0 && k < n) {
      tw_select_topk(x + begin, n, k, out, smallest + s, threads);
      for (int64_t i = 0; i < k; ++i) out[i] += begin;
    } else if (k > 0) {
      uint32_t least = kInfinity;
      for (int64_t i = 0; i < n; ++i) {
        out[i] = begin + i;
        least = std::min(least, magnitude(x[begin + i]));
      }
      std::memcpy(smallest + s, &least, 4);
    }
    at = end;
    out += k;
  }
}
