// Sign quantisation and the checksum.

#include <cmath>
#include <cstring>

#include "mix.h"
#include "parallel.h"

namespace {

using thinwire::mix;

constexpr int kLanes = 16;

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

// Signs (unless `negative` is null) and mean magnitudes of consecutive blocks: runs of (length, count).
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
          if (negative) negative_range(x + start + i, negative + start + i, n);
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
          if (negative) negative_range(x + start + i, negative + start + i, length);
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
