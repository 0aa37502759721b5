// What a server does with everybody's signs and trits, and how answers reach the gradient: without a vector in between.

#include <cstring>

#include "parallel.h"

namespace {

constexpr int64_t kChunk = 4096;  // elements that are worked on at a time, in the cache; a multiple of 8 and of 32

// Calls work(s, from, n, done) for the stretches of consecutive segments that make up elements [begin, end).
template <typename Work>
void for_segments(const std::vector<int64_t>& ends, int64_t begin, int64_t end, const Work& work) {
  size_t s = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
  for (int64_t at = begin; at < end;) {
    while (ends[s] <= at) ++s;
    int64_t n = std::min(ends[s], end) - at;
    work(s, at - (s ? ends[s - 1] : 0), n, at - begin);
    at += n;
  }
}

std::vector<int64_t> ends_of(int64_t num, const int64_t* numels) {
  std::vector<int64_t> ends(num);
  int64_t total = 0;
  for (int64_t s = 0; s < num; ++s) ends[s] = total += numels[s];
  return ends;
}

THINWIRE_CLONES
void negative_range(const float* __restrict x, uint8_t* __restrict out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] < 0.0f;
}

inline void pack_range(const uint8_t* bits, int64_t n, uint8_t* out) {  // bits[n] .. must be readable up to a multiple of 8
  for (int64_t i = 0; i < n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, bits + i, 8);
    out[i >> 3] = static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56);
  }
}

inline void unpack_range(const uint8_t* packed, int64_t n, uint8_t* bits) {  // writes up to a multiple of 8
  for (int64_t i = 0; i < n; i += 8) {
    // The byte in all eight places, one bit left in each, moved to the lowest place: 0x7F carries it into the highest.
    uint64_t eight = (packed[i >> 3] * 0x0101010101010101ull) & 0x8040201008040201ull;
    eight = ((eight + 0x7F7F7F7F7F7F7F7Full) | eight) >> 7 & 0x0101010101010101ull;
    std::memcpy(bits + i, &eight, 8);
  }
}

THINWIRE_CLONES
void add_signed(float* __restrict out, const uint8_t* __restrict negative, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += negative[i] ? -scale : scale;
}

THINWIRE_CLONES
void write_signed(float* __restrict out, const uint8_t* __restrict negative, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = negative[i] ? -scale : scale;
}

THINWIRE_CLONES
void take_off(float* __restrict x, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] += x[i] < 0.0f ? scale : -scale;
}

THINWIRE_CLONES
void add_mean(float* __restrict out, const float* __restrict sum, float divisor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] += sum[i] / divisor;
}

THINWIRE_CLONES
void add_bytes(uint16_t* __restrict sum, const uint8_t* __restrict digits, int64_t n) {
  for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<uint16_t>(sum[i] + digits[i]);
}

THINWIRE_CLONES
void write_mean(float* __restrict out, const uint32_t* __restrict levels, float ranks, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = scale * (static_cast<float>(static_cast<int32_t>(levels[i])) - ranks) / ranks;
}

// Blocks of a vector as runs of (length, count): calls work(block, n, done) for the stretches of [begin, end).
struct Runs {
  std::vector<int64_t> ends, blocks;
  const int64_t* lengths;
  Runs(int64_t num, const int64_t* lengths, const int64_t* counts) : ends(num), blocks(num), lengths(lengths) {
    int64_t total = 0, block = 0;
    for (int64_t r = 0; r < num; ++r) {
      blocks[r] = block;
      block += counts[r];
      ends[r] = total += lengths[r] * counts[r];
    }
  }
  int64_t numel() const { return ends.empty() ? 0 : ends.back(); }
  template <typename Work>
  void each(int64_t begin, int64_t end, const Work& work) const {
    for_segments(ends, begin, end, [&](size_t r, int64_t from, int64_t n, int64_t done) {
      for (int64_t at = from; at < from + n;) {
        int64_t stop = std::min(from + n, (at / lengths[r] + 1) * lengths[r]);
        work(blocks[r] + at / lengths[r], stop - at, done + at - from);
        at = stop;
      }
    });
  }
};

}  // namespace

// The sign bits of vectors wherever they lie, one behind the other.
THINWIRE_API void tw_pack_signs(int64_t num_parts, const uint64_t* parts, const int64_t* numels, uint8_t* out,
                                int threads) {
  const std::vector<int64_t> ends = ends_of(num_parts, numels);
  const int64_t total = ends.empty() ? 0 : ends.back();
  thinwire::parallel(total, threads, 8, [&](int, int64_t begin, int64_t end) {
    uint8_t bits[kChunk];
    for (int64_t at = begin; at < end; at += kChunk) {
      int64_t n = std::min(kChunk, end - at);
      for_segments(ends, at, at + n, [&](size_t s, int64_t from, int64_t m, int64_t done) {
        negative_range(reinterpret_cast<const float*>(parts[s]) + from, bits + done, m);
      });
      if (n % 8) std::memset(bits + n, 0, static_cast<size_t>(8 - n % 8));
      pack_range(bits, n, out + at / 8);
    }
  });
}

// x -= scale * sign(x), block by block: what remains when x itself was sent as signs.
THINWIRE_API void tw_subtract_own_signs(float* x, const float* scales, int64_t num_runs, const int64_t* lengths,
                                        const int64_t* counts, int threads) {
  const Runs runs(num_runs, lengths, counts);
  thinwire::parallel(runs.numel(), threads, 64, [&](int, int64_t begin, int64_t end) {
    runs.each(begin, end, [&](int64_t block, int64_t n, int64_t done) { take_off(x + begin + done, scales[block], n); });
  });
}

// out += (sum over frames of scale * sign) / num_frames, the sum in the order of the frames.
THINWIRE_API void tw_add_mean_of_signs(float* out, int64_t num_frames, const uint64_t* packed, const uint64_t* scales,
                                       int64_t num_runs, const int64_t* lengths, const int64_t* counts, int threads) {
  const Runs runs(num_runs, lengths, counts);
  thinwire::parallel(runs.numel(), threads, 8, [&](int, int64_t begin, int64_t end) {
    uint8_t bits[kChunk];
    float sum[kChunk];
    for (int64_t at = begin; at < end; at += kChunk) {
      int64_t n = std::min(kChunk, end - at);
      std::memset(sum, 0, sizeof sum);
      for (int64_t f = 0; f < num_frames; ++f) {
        unpack_range(reinterpret_cast<const uint8_t*>(packed[f]) + at / 8, n, bits);
        const float* own = reinterpret_cast<const float*>(scales[f]);
        runs.each(at, at + n, [&](int64_t block, int64_t m, int64_t done) {
          add_signed(sum + done, bits + done, own[block], m);
        });
      }
      add_mean(out + at, sum, static_cast<float>(num_frames), n);
    }
  });
}

// The values of a sign frame into vectors wherever they lie, which take it up one behind the other.
THINWIRE_API void tw_write_signs(int64_t num_parts, const uint64_t* parts, const int64_t* numels, const uint8_t* packed,
                                 const float* scales, int64_t num_runs, const int64_t* lengths, const int64_t* counts,
                                 int threads) {
  const std::vector<int64_t> ends = ends_of(num_parts, numels);
  const Runs runs(num_runs, lengths, counts);
  thinwire::parallel(runs.numel(), threads, 8, [&](int, int64_t begin, int64_t end) {
    uint8_t bits[kChunk];
    for (int64_t at = begin; at < end; at += kChunk) {
      int64_t n = std::min(kChunk, end - at);
      unpack_range(packed + at / 8, n, bits);
      for_segments(ends, at, at + n, [&](size_t s, int64_t from, int64_t m, int64_t done) {
        float* out = reinterpret_cast<float*>(parts[s]) + from;
        runs.each(at + done, at + done + m, [&](int64_t block, int64_t k, int64_t more) {
          write_signed(out + more, bits + done + more, scales[block], k);
        });
      });
    }
  });
}

// Sums of the trits of several frames as levels 0 .. 2 * num_frames, `bits` bits each, lowest first, without gaps.
THINWIRE_API void tw_sum_trits(int64_t num_frames, const uint64_t* packed, int64_t n, int bits, uint8_t* out,
                               int threads) {
  constexpr int64_t kTrits = 40 * 64;  // a multiple of 5 and of 8: whole bytes in, whole bytes out
  static const auto table = [] {
    std::vector<uint8_t> t(256 * 8, 0);
    for (int byte = 0; byte < 256; ++byte)
      for (int place = 0, rest = byte; place < 5; ++place, rest /= 3) t[byte * 8 + place] = static_cast<uint8_t>(rest % 3);
    return t;
  }();
  thinwire::parallel(n, threads, 40, [&](int, int64_t begin, int64_t end) {
    uint8_t digits[kTrits + 8];
    uint16_t sum[kTrits];
    for (int64_t at = begin; at < end; at += kTrits) {
      int64_t m = std::min(kTrits, end - at);
      std::memset(sum, 0, sizeof sum);
      for (int64_t f = 0; f < num_frames; ++f) {
        const uint8_t* in = reinterpret_cast<const uint8_t*>(packed[f]) + at / 5;
        for (int64_t i = 0; i < m; i += 5) std::memcpy(digits + i, table.data() + 8 * *in++, 8);
        add_bytes(sum, digits, m);
      }
      uint64_t window = 0;
      int filled = 0;
      uint8_t* to = out + at * bits / 8;
      for (int64_t i = 0; i < m; ++i) {
        window |= static_cast<uint64_t>(sum[i]) << filled;
        for (filled += bits; filled >= 8; filled -= 8, window >>= 8) *to++ = static_cast<uint8_t>(window);
      }
      if (filled) *to = static_cast<uint8_t>(window);
    }
  });
}

// part = scale * (level - ranks) / ranks into vectors wherever they lie, one scale each. Returns whether every level is at
// most 2 * ranks.
THINWIRE_API int tw_write_levels(int64_t num_parts, const uint64_t* parts, const int64_t* numels, const float* scales,
                                 const uint8_t* packed, int bits, int64_t ranks, int threads) {
  const std::vector<int64_t> ends = ends_of(num_parts, numels);
  const int64_t total = ends.empty() ? 0 : ends.back(), nbytes = (total * bits + 7) / 8;
  const uint32_t mask = (1u << bits) - 1;
  std::vector<uint32_t> largest(std::max(1, threads), 0);
  thinwire::parallel(total, threads, 8, [&](int part, int64_t begin, int64_t end) {
    uint32_t levels[kChunk], most = 0;
    for (int64_t at = begin; at < end; at += kChunk) {
      int64_t n = std::min(kChunk, end - at);
      for (int64_t i = 0; i < n; ++i) {
        int64_t bit = (at + i) * bits, byte = bit >> 3;
        uint64_t window = 0;
        std::memcpy(&window, packed + byte, static_cast<size_t>(std::min<int64_t>(8, nbytes - byte)));
        levels[i] = static_cast<uint32_t>(window >> (bit & 7)) & mask;
        most = std::max(most, levels[i]);
      }
      for_segments(ends, at, at + n, [&](size_t s, int64_t from, int64_t m, int64_t done) {
        write_mean(reinterpret_cast<float*>(parts[s]) + from, levels + done, static_cast<float>(ranks), scales[s], m);
      });
    }
    largest[part] = most;
  });
  for (uint32_t most : largest)
    if (most > 2 * static_cast<uint64_t>(ranks)) return 0;
  return 1;
}
