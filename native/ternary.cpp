// TernGrad in two passes over the gradient: moments, then random trits that are packed while they are in the cache.

#include <cmath>
#include <cstring>
#include <limits>

#include "mix.h"
#include "parallel.h"

namespace {

constexpr uint32_t kInfinity = 0x7F800000u;
constexpr int kLanes = 32;
constexpr int64_t kBlock = 1024;      // elements whose sums are taken in float: 32 a lane
constexpr int64_t kChunk = 1 << 16;   // elements a task: the order of all sums depends on nothing but the length
constexpr int64_t kBytes = 64;        // packed at a time
constexpr float kSmallest = 1e-12f, kLargest = 1e18f;  // between these the squares of floats neither vanish nor overflow

// Count, mean and sum of squares about the mean, and the bits of the largest magnitude.
struct Moments {
  double count = 0, mean = 0, squares = 0;
  uint32_t largest = 0;

  void add(const Moments& other) {  // Chan, Golub and LeVeque's update
    largest = std::max(largest, other.largest);
    if (other.count == 0) return;
    double delta = other.mean - mean, both = count + other.count;
    squares += other.squares + delta * delta * (count * other.count / both);
    mean += delta * (other.count / both);
    count = both;
  }
};

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A block about its own mean: the second look finds it in the cache, and nothing cancels. n is a multiple of kLanes.
THINWIRE_CLONES
void block_moments(const float* x, int64_t n, float* center, float* sum, float* squares, uint32_t* largest) {
  float lanes[kLanes] = {0};
  for (int64_t i = 0; i < n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += x[i + l];
  float total = 0;
  for (int l = 0; l < kLanes; ++l) total += lanes[l];
  const float c = total / static_cast<float>(n);
  float s[kLanes] = {0}, q[kLanes] = {0};
  uint32_t m[kLanes] = {0};
  for (int64_t i = 0; i < n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      uint32_t bits;
      std::memcpy(&bits, x + i + l, 4);
      bits &= 0x7FFFFFFFu;
      m[l] = bits > m[l] ? bits : m[l];
      float d = x[i + l] - c;
      s[l] += d;
      q[l] += d * d;
    }
  *center = c;
  *sum = *squares = 0;
  *largest = 0;
  for (int l = 0; l < kLanes; ++l) {
    *sum += s[l];
    *squares += q[l];
    *largest = std::max(*largest, m[l]);
  }
}

Moments exact_moments(const float* x, int64_t n) {  // in double: for few elements, and for very small or large ones
  Moments all;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    all.largest = std::max(all.largest, bits & 0x7FFFFFFFu);
    all.mean += x[i];
  }
  all.count = static_cast<double>(n);
  all.mean /= all.count;
  for (int64_t i = 0; i < n; ++i) {
    double d = x[i] - all.mean;
    all.squares += d * d;
  }
  return all;
}

Moments chunk_moments(const float* x, int64_t n) {
  Moments all;
  int64_t i = 0;
  for (; i < n; i += kBlock) {
    int64_t length = std::min(kBlock, n - i), whole = length / kLanes * kLanes;
    if (whole) {
      float center, sum, squares;
      Moments block;
      block_moments(x + i, whole, &center, &sum, &squares, &block.largest);
      block.count = static_cast<double>(whole);
      double rest = sum / block.count;
      block.mean = center + rest;
      block.squares = std::max(0.0, squares - rest * sum);
      all.add(block);
    }
    if (whole < length) all.add(exact_moments(x + i + whole, length - whole));
  }
  float largest = bits_to_float(all.largest);
  if (largest > 0 && !(largest >= kSmallest && largest <= kLargest)) return exact_moments(x, n);
  return all;
}

// trit + 1 of elements first, first + 1 ... of a segment.
THINWIRE_CLONES
void draw_trits(const float* __restrict x, uint8_t* __restrict out, int64_t n, uint32_t first, float scale, float limit,
                uint32_t key, uint32_t key2) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t random = thinwire::mix(thinwire::mix((first + static_cast<uint32_t>(i)) ^ key) ^ key2);
    float uniform = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;
    float threshold = uniform * scale;
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    int32_t keep = (threshold < bits_to_float(bits & 0x7FFFFFFFu)) & (threshold < limit);  // never a nan
    int32_t sign = 1 - static_cast<int32_t>(bits >> 31 << 1);
    out[i] = static_cast<uint8_t>(1 + (keep ? sign : 0));
  }
}

// Five numbers below three a byte. In the product the highest byte is their weighted sum, and no lower one overflows.
inline void pack_block(const uint8_t* digits, int64_t nbytes, uint8_t* out) {
  constexpr uint64_t kWeights = (1ull << 56) | (3ull << 48) | (9ull << 40) | (27ull << 32) | (81ull << 24);
  for (int64_t j = 0; j < nbytes; ++j) {
    uint64_t five;
    std::memcpy(&five, digits + 5 * j, 8);
    out[j] = static_cast<uint8_t>(((five & 0xFFFFFFFFFFull) * kWeights) >> 56);
  }
}

// Writes the packed bytes [begin, end) of the segments one behind the other; fill(segment, from, n, digits) gives n digits
// of a segment from element `from`.
template <typename Fill>
void pack_segments(const std::vector<int64_t>& ends, int64_t begin, int64_t end, uint8_t* out, const Fill& fill) {
  const int64_t total = ends.empty() ? 0 : ends.back();
  uint8_t digits[5 * kBytes + 8] = {0};
  size_t s = std::upper_bound(ends.begin(), ends.end(), 5 * begin) - ends.begin();
  for (int64_t byte = begin; byte < end; byte += kBytes) {
    int64_t nbytes = std::min(kBytes, end - byte), stop = std::min(total, 5 * (byte + nbytes));
    int64_t at = 5 * byte;
    if (stop - at < 5 * kBytes) std::memset(digits, 0, sizeof digits);
    for (int64_t done = 0; at < stop;) {
      while (ends[s] <= at) ++s;
      int64_t n = std::min(ends[s], stop) - at;
      fill(s, at - (s ? ends[s - 1] : 0), n, digits + done);
      at += n;
      done += n;
    }
    pack_block(digits, nbytes, out + byte);
  }
}

std::vector<int64_t> ends_of(int64_t num, const int64_t* numels) {
  std::vector<int64_t> ends(num);
  int64_t total = 0;
  for (int64_t s = 0; s < num; ++s) ends[s] = total += numels[s];
  return ends;
}

}  // namespace

// The population standard deviation and the largest magnitude of every segment; nan where an element is one, and no
// deviation (nan) beside an infinity. The result does not depend on the number of threads.
THINWIRE_API void tw_moments(int64_t num_segments, const uint64_t* parts, const int64_t* numels, float* deviations,
                             float* largest, int threads) {
  std::vector<int64_t> first(num_segments + 1, 0);  // chunks before each segment
  for (int64_t s = 0; s < num_segments; ++s) first[s + 1] = first[s] + (numels[s] + kChunk - 1) / kChunk;
  std::vector<Moments> chunks(first.back());
  int64_t total = 0;
  for (int64_t s = 0; s < num_segments; ++s) total += numels[s];
  thinwire::parallel(first.back(), total < thinwire::kSerialBelow ? 1 : threads, 1, [&](int, int64_t begin, int64_t end) {
    size_t s = std::upper_bound(first.begin(), first.end(), begin) - first.begin() - 1;
    for (int64_t c = begin; c < end; ++c) {
      while (c >= first[s + 1]) ++s;
      int64_t at = (c - first[s]) * kChunk;
      chunks[c] = chunk_moments(reinterpret_cast<const float*>(parts[s]) + at, std::min(kChunk, numels[s] - at));
    }
  }, 1);
  for (int64_t s = 0; s < num_segments; ++s) {
    Moments all;
    for (int64_t c = first[s]; c < first[s + 1]; ++c) all.add(chunks[c]);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    bool finite = all.largest < kInfinity;
    deviations[s] = !finite ? nan : all.count ? static_cast<float>(std::sqrt(all.squares / all.count)) : 0.0f;
    largest[s] = all.largest > kInfinity ? nan : bits_to_float(all.largest);
  }
}

// Ternarizes segments wherever they lie and packs them, one behind the other, five trits per byte; counters are the places
// in the random streams of the segments' first elements.
THINWIRE_API void tw_ternarize_packed(int64_t num_segments, const uint64_t* parts, const int64_t* numels,
                                      const float* scales, const float* limits, const uint32_t* keys,
                                      const int64_t* counters, uint8_t* out, int threads) {
  const std::vector<int64_t> ends = ends_of(num_segments, numels);
  const int64_t total = ends.empty() ? 0 : ends.back();
  thinwire::parallel((total + 4) / 5, threads, kBytes, [&](int, int64_t begin, int64_t end) {
    pack_segments(ends, begin, end, out, [&](size_t s, int64_t from, int64_t n, uint8_t* digits) {
      draw_trits(reinterpret_cast<const float*>(parts[s]) + from, digits, n, static_cast<uint32_t>(counters[s] + from),
                 scales[s], limits[s], keys[s], thinwire::mix(keys[s] + 0x9E3779B9u));
    });
  }, thinwire::kSerialBelow / 5);
}
