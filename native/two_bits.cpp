// Values in two bits: a sign, and whether the magnitude reaches the mean of its chunk.

#include <cmath>
#include <cstring>

#include "parallel.h"

namespace {

constexpr int64_t kChunk = 64;
constexpr uint32_t kInfinity = 0x7F800000u;
constexpr uint16_t kNan = 0x7FC0, kLargest = 0x7F7F;  // as bfloat16

// The second half is added to the first until one is left: an order that rounds alike everywhere.
inline double sum_by_halves(double* x) {
  for (int64_t half = kChunk / 2; half; half /= 2)
    for (int64_t i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// The nearest bfloat16, ties to even; a finite number beyond the range becomes the largest finite one.
inline uint16_t to_bfloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t top = (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>(std::min<uint32_t>(top, kLargest));
}

inline uint32_t bits_of(uint16_t bfloat) { return static_cast<uint32_t>(bfloat) << 16; }

THINWIRE_CLONES
void encode_chunk(const float* __restrict x, int64_t n, uint16_t* __restrict levels, uint8_t* __restrict packed) {
  float values[kChunk] = {0};
  double all[kChunk], above[kChunk], below[kChunk];
  uint8_t codes[kChunk] = {0};
  std::memcpy(values, x, static_cast<size_t>(n) * sizeof(float));
  for (int64_t i = 0; i < kChunk; ++i) all[i] = std::fabs(values[i]);
  const float mean = static_cast<float>(sum_by_halves(all) / static_cast<double>(n));
  int32_t reached = 0;
  for (int64_t i = 0; i < kChunk; ++i) {
    const float magnitude = std::fabs(values[i]);
    const bool high = magnitude >= mean;
    above[i] = high ? magnitude : 0.0f;
    below[i] = high ? 0.0f : magnitude;
    reached += high;
    codes[i] = static_cast<uint8_t>(high | (values[i] < 0.0f) << 1);
  }
  for (int64_t i = n; i < kChunk; ++i) codes[i] = 0;  // filling would reach a mean of 0
  for (int64_t i = 0; i < (n + 3) / 4; ++i) {
    uint32_t four;
    std::memcpy(&four, codes + 4 * i, 4);
    packed[i] = static_cast<uint8_t>(four | four >> 6 | four >> 12 | four >> 18);
  }
  uint32_t bits;
  std::memcpy(&bits, &mean, 4);
  if ((bits & kInfinity) == kInfinity) {  // an inf or a nan: the chunk decodes to nan and is seen
    levels[0] = levels[1] = kNan;
    return;
  }
  levels[0] = to_bfloat(static_cast<float>(sum_by_halves(below) / static_cast<double>(std::max<int64_t>(1, n - reached))));
  levels[1] = to_bfloat(static_cast<float>(sum_by_halves(above) / static_cast<double>(std::max(1, reached))));
}

THINWIRE_CLONES
void decode_chunk(const uint16_t* __restrict levels, const uint8_t* __restrict packed, int64_t n, float* __restrict out) {
  const uint32_t low = bits_of(levels[0]), high = bits_of(levels[1]);
  uint8_t bytes[kChunk / 4] = {0}, codes[kChunk];
  std::memcpy(bytes, packed, static_cast<size_t>(n + 3) / 4);
  for (int64_t i = 0; i < kChunk / 4; ++i) {
    const uint32_t byte = bytes[i], four = byte | byte << 6 | byte << 12 | byte << 18;
    std::memcpy(codes + 4 * i, &four, 4);
  }
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = ((codes[i] & 1u) ? high : low) ^ (static_cast<uint32_t>(codes[i] & 2u) << 30);
    std::memcpy(out + i, &bits, 4);
  }
}

}  // namespace

// For every 64 values two levels, as bfloat16, and a code of two bits for each value.
THINWIRE_API void tw_two_bit_encode(const float* values, int64_t n, uint16_t* levels, uint8_t* packed) {
  for (int64_t i = 0; i < n; i += kChunk)
    encode_chunk(values + i, std::min(kChunk, n - i), levels + i / kChunk * 2, packed + i / 4);
}

THINWIRE_API void tw_two_bit_decode(const uint16_t* levels, const uint8_t* packed, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kChunk)
    decode_chunk(levels + i / kChunk * 2, packed + i / 4, std::min(kChunk, n - i), out + i);
}
