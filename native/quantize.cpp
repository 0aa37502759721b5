// Sign and 8-bit quantisation, and the checksum.

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

namespace {

constexpr int64_t kChunk = 256;  // 8-bit values that share a scale
constexpr float kLargestScale = 2.67938838e36f;  // the largest float that 127 times is still finite

// Where the largest magnitude of a chunk is not finite the scale is a nan: the chunk decodes to nan and is seen.
THINWIRE_CLONES
float scale_of(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7FFFFFFFu;
    largest = bits > largest ? bits : largest;
  }
  if (largest >= 0x7F800000u) return std::nanf("");
  float most;
  std::memcpy(&most, &largest, 4);
  return std::min(most / 127.0f, kLargestScale);
}

// A denormal scale makes the quotient overflow; the bounds keep it within +-127. They are written so that a nan is 0.
THINWIRE_CLONES
void code_chunk(const float* __restrict x, int64_t n, float divisor, int8_t* __restrict codes) {
  for (int64_t i = 0; i < n; ++i) {
    float code = std::nearbyint(x[i] / divisor);
    code = code > 127.0f ? 127.0f : code;
    code = code < -127.0f ? -127.0f : code;
    codes[i] = static_cast<int8_t>(code == code ? code : 0.0f);
  }
}

}  // namespace

// Chunks of 256 values as multiples of their largest magnitude / 127.
THINWIRE_API void tw_int8_quantize(const float* values, int64_t n, int8_t* codes, float* scales) {
  for (int64_t i = 0; i < n; i += kChunk) {
    const int64_t count = std::min(kChunk, n - i);
    const float scale = scale_of(values + i, count);
    scales[i / kChunk] = scale;
    code_chunk(values + i, count, scale > 0.0f ? scale : 1.0f, codes + i);
  }
}

THINWIRE_API void tw_int8_dequantize(const int8_t* codes, const float* scales, int64_t n, float* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(codes[i]) * scales[i / kChunk];
}

THINWIRE_API uint32_t tw_checksum(const uint32_t* words, int64_t n, uint32_t start) {
  return checksum_range(words, n, start);
}
