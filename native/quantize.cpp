// Random numbers from counters, ternary and sign quantisation.

#include <cmath>
#include <cstring>

#include "parallel.h"

namespace {

inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  return x;
}

THINWIRE_CLONES
void ternarize_range(const float* __restrict x, int8_t* __restrict out, int64_t begin, int64_t end, float scale,
                     float limit, uint32_t key, uint32_t key2) {
  for (int64_t i = begin; i < end; ++i) {
    uint32_t random = mix(mix(static_cast<uint32_t>(i) ^ key) ^ key2);
    float uniform = static_cast<float>(static_cast<int32_t>(random >> 8)) * 0x1p-24f;
    float threshold = uniform * scale;
    int keep = (threshold < std::fabs(x[i])) & (threshold < limit);  // never a nan
    out[i] = static_cast<int8_t>(x[i] < 0.0f ? -keep : keep);
  }
}

constexpr int kLanes = 16;

// Sum, sum of squares about `center`, and largest magnitude, in double lanes.
THINWIRE_CLONES
void moments_range(const float* x, int64_t n, double* sum, double* squares, float* largest) {
  double s[kLanes] = {0}, q[kLanes] = {0};
  float m[kLanes] = {0};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) {
      float value = x[i + l];
      float size = std::fabs(value);
      s[l] += value;
      q[l] += static_cast<double>(value) * value;
      m[l] = size > m[l] ? size : m[l];
    }
  for (; i < n; ++i) {
    s[0] += x[i];
    q[0] += static_cast<double>(x[i]) * x[i];
    m[0] = std::max(m[0], std::fabs(x[i]));
  }
  for (int l = 0; l < kLanes; ++l) {
    *sum += s[l];
    *squares += q[l];
    *largest = std::max(*largest, m[l]);
  }
}

THINWIRE_CLONES
double sum_of_magnitudes(const float* x, int64_t n) {
  double s[kLanes] = {0};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) s[l] += std::fabs(x[i + l]);
  for (; i < n; ++i) s[0] += std::fabs(x[i]);
  double total = 0;
  for (int l = 0; l < kLanes; ++l) total += s[l];
  return total;
}

THINWIRE_CLONES
void negative_range(const float* __restrict x, uint8_t* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] < 0.0f;
}

THINWIRE_CLONES
void add_signed_range(float* __restrict out, const uint8_t* __restrict negative, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += negative[i] ? -scale : scale;
}

THINWIRE_CLONES
uint32_t checksum_range(const uint32_t* words, int64_t n, uint32_t start) {
  uint32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += mix(mix(start + static_cast<uint32_t>(i)) ^ words[i]);
  return sum;
}

}  // namespace

THINWIRE_API void tw_ternarize(const float* x, int8_t* out, int64_t n, float scale, float limit, uint32_t key,
                               int threads) {
  uint32_t key2 = mix(key + 0x9E3779B9u);
  thinwire::parallel(n, threads, 64, [&](int, int64_t begin, int64_t end) {
    ternarize_range(x, out, begin, end, scale, limit, key, key2);
  });
}

// out: sum, sum of squares, largest magnitude.
THINWIRE_API void tw_moments(const float* x, int64_t n, double* out, int threads) {
  std::vector<double> sums(std::max(1, threads), 0.0), squares(std::max(1, threads), 0.0);
  std::vector<float> largest(std::max(1, threads), 0.0f);
  thinwire::parallel(n, threads, 64, [&](int part, int64_t begin, int64_t end) {
    moments_range(x + begin, end - begin, &sums[part], &squares[part], &largest[part]);
  });
  out[0] = out[1] = out[2] = 0.0;
  for (size_t p = 0; p < sums.size(); ++p) {
    out[0] += sums[p];
    out[1] += squares[p];
    out[2] = std::max(out[2], static_cast<double>(largest[p]));
  }
}

// Signs and mean magnitudes of consecutive blocks: runs of (length, count).
THINWIRE_API void tw_blockwise_sign(const float* x, int64_t num_runs, const int64_t* lengths, const int64_t* counts,
                                    uint8_t* negative, float* scales, int threads) {
  int64_t start = 0, block = 0;
  for (int64_t r = 0; r < num_runs; ++r) {
    int64_t length = lengths[r], count = counts[r];
    if (count == 1) {  // one long block: split it
      std::vector<double> sums(std::max(1, threads), 0.0);
      thinwire::parallel(length, threads, 64, [&](int part, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += 4096) {  // the second look at 4096 elements finds them in the cache
          int64_t n = std::min<int64_t>(4096, end - i);
          sums[part] += sum_of_magnitudes(x + start + i, n);
          negative_range(x + start + i, negative + start + i, n);
        }
      });
      double sum = 0;
      for (double s : sums) sum += s;
      scales[block] = static_cast<float>(sum / static_cast<double>(length));
    } else {
      int64_t n = length * count;
      thinwire::parallel(n, threads, length, [&](int, int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i += length) {
          double sum = sum_of_magnitudes(x + start + i, length);
          scales[block + i / length] = static_cast<float>(sum / static_cast<double>(length));
          negative_range(x + start + i, negative + start + i, length);
        }
      });
    }
    start += length * count;
    block += count;
  }
}

// out += sign * scale * factor, block by block.
THINWIRE_API void tw_add_signs(float* out, const uint8_t* negative, const float* scales, int64_t num_runs,
                               const int64_t* lengths, const int64_t* counts, float factor, int threads) {
  int64_t start = 0, block = 0;
  for (int64_t r = 0; r < num_runs; ++r) {
    int64_t length = lengths[r], n = length * counts[r];
    thinwire::parallel(n, threads, counts[r] == 1 ? 64 : length, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end;) {
        int64_t stop = std::min(end, (i / length + 1) * length);
        add_signed_range(out + start + i, negative + start + i, scales[block + i / length] * factor, stop - i);
        i = stop;
      }
    });
    start += n;
    block += counts[r];
  }
}

THINWIRE_API uint32_t tw_checksum(const uint32_t* words, int64_t n, uint32_t start) {
  return checksum_range(words, n, start);
}
