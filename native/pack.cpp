// Small integers to bytes and back, lowest bit first.

#include <cstring>

#include "parallel.h"

namespace {

// Eight 0/1 bytes to one byte: the multiplication gathers the lowest bits of all eight at the top.
inline uint8_t gather_bits(uint64_t eight) { return static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56); }

inline uint32_t get_bits(const uint8_t* in, int64_t nbytes, int64_t at, int bits) {
  uint64_t window = 0;
  int64_t byte = at >> 3, available = std::min<int64_t>(8, nbytes - byte);
  if (available <= 0) return 0;
  std::memcpy(&window, in + byte, static_cast<size_t>(available));
  return static_cast<uint32_t>((window >> (at & 7)) & ((1ull << bits) - 1));
}

}  // namespace

THINWIRE_API void tw_pack_bits(const uint8_t* bits, int64_t n, uint8_t* out, int threads) {
  thinwire::parallel(n, threads, 8, [&](int, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) {
      uint64_t eight;
      std::memcpy(&eight, bits + i, 8);
      out[i >> 3] = gather_bits(eight);
    }
    if (i < end) {
      uint64_t eight = 0;
      std::memcpy(&eight, bits + i, static_cast<size_t>(end - i));
      out[i >> 3] = gather_bits(eight);
    }
  });
}

THINWIRE_API void tw_unpack_bits(const uint8_t* packed, int64_t n, uint8_t* out, int threads) {
  thinwire::parallel(n, threads, 8, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 8) {
      uint8_t byte = packed[i >> 3];
      int64_t stop = std::min<int64_t>(8, end - i);
      for (int64_t b = 0; b < stop; ++b) out[i + b] = (byte >> b) & 1;
    }
  });
}

THINWIRE_API void tw_pack_trits(const int8_t* trits, int64_t n, uint8_t* out, int threads) {
  thinwire::parallel(n, threads, 5, [&](int, int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + 5 <= end; i += 5) {
      const int8_t* t = trits + i;
      out[i / 5] = static_cast<uint8_t>((t[0] + 1) + 3 * (t[1] + 1) + 9 * (t[2] + 1) + 27 * (t[3] + 1) + 81 * (t[4] + 1));
    }
    if (i < end) {
      int packed = 0, weight = 1;
      for (; i < end; ++i, weight *= 3) packed += weight * (trits[i] + 1);
      out[(end - 1) / 5] = static_cast<uint8_t>(packed);
    }
  });
}

THINWIRE_API void tw_unpack_trits(const uint8_t* packed, int64_t n, int8_t* out, int threads) {
  static const auto table = [] {
    std::vector<int8_t> t(256 * 5);
    for (int byte = 0; byte < 256; ++byte)
      for (int place = 0, rest = byte; place < 5; ++place, rest /= 3) t[byte * 5 + place] = static_cast<int8_t>(rest % 3 - 1);
    return t;
  }();
  thinwire::parallel(n, threads, 5, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += 5)
      std::memcpy(out + i, table.data() + 5 * packed[i / 5], static_cast<size_t>(std::min<int64_t>(5, end - i)));
  });
}

namespace {

// What lies between a rising index and the one before it.
inline uint64_t gap_before(const uint32_t* indices, int64_t i) { return i ? indices[i] - indices[i - 1] - 1 : indices[0]; }

}  // namespace

// Bits of all quotients in unary, for each Rice parameter of [first, first + choices).
THINWIRE_API void tw_rice_unary_bits_of(const uint32_t* indices, int64_t n, int first, int choices, int64_t* out) {
  for (int c = 0; c < choices; ++c) {
    uint64_t sum = static_cast<uint64_t>(n);
    for (int64_t i = 0; i < n; ++i) sum += gap_before(indices, i) >> (first + c);
    out[c] = static_cast<int64_t>(sum);
  }
}

// Bits are gathered in a word of their own and leave it by fours of bytes. parameter <= 30; `unary` must be zero, and both
// large enough.
THINWIRE_API void tw_rice_encode_of(const uint32_t* indices, int64_t n, int parameter, uint8_t* low, uint8_t* unary) {
  const uint64_t mask = (uint64_t{1} << parameter) - 1;
  uint64_t word = 0, at = ~uint64_t{0};
  int filled = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint64_t here = gap_before(indices, i);
    word |= (here & mask) << filled;
    filled += parameter;
    if (filled >= 32) {
      std::memcpy(low, &word, 4);
      low += 4;
      word >>= 32;
      filled -= 32;
    }
    at += (here >> parameter) + 1;
    unary[at >> 3] |= static_cast<uint8_t>(1u << (at & 7));
  }
  if (filled) std::memcpy(low, &word, static_cast<size_t>((filled + 7) / 8));
}

namespace {

struct Rice {
  const uint8_t *low, *unary;
  int64_t low_nbytes, unary_nbytes, count;
  int parameter;
};

// Whether a gap of a well-formed stream is numel or more.
bool wide_gap(const Rice& rice, uint64_t numel) {
  int64_t count = 0, before = -1;
  for (int64_t at = 0; count < rice.count; ++at) {
    if (!((rice.unary[at >> 3] >> (at & 7)) & 1)) continue;
    uint64_t low = rice.parameter ? get_bits(rice.low, rice.low_nbytes, count * rice.parameter, rice.parameter) : 0;
    if (((static_cast<uint64_t>(at - before - 1) << rice.parameter) | low) >= numel) return true;
    before = at;
    ++count;
  }
  return false;
}

// Decodes rising indices below numel and checks them. Returns 0, or what is wrong: 1 the number of entries, 2 a gap of
// numel or more, 3 bytes behind the quotients (which fill whole groups of four), 4 an index of numel or more. Nothing is
// written behind the given number of entries. `Index` has to hold numel.
template <typename Index>
inline __attribute__((always_inline)) int rice_indices(const Rice& rice, uint64_t numel, Index* __restrict out) {
  const uint8_t *low = rice.low, *unary = rice.unary;
  const int64_t n = rice.count, low_nbytes = rice.low_nbytes, nbytes = rice.unary_nbytes;
  const int parameter = rice.parameter;
  const uint64_t most = numel >> parameter, mask = (1ull << parameter) - 1;
  // So many entries have eight bytes to load at their low bits.
  const int64_t quick = parameter && low_nbytes >= 8 ? ((low_nbytes - 8) * 8) / parameter : 0;
  int64_t count = 0, before = -1, bit = 0;
  uint64_t next = 0, longest = 0;  // `next` is one behind the last index; looked at so often that it cannot wrap around
  bool outside = false;
  for (int64_t byte = 0; byte < nbytes; byte += 8) {
    uint64_t window = 0;
    if (byte + 8 <= nbytes)
      std::memcpy(&window, unary + byte, 8);
    else
      std::memcpy(&window, unary + byte, static_cast<size_t>(nbytes - byte));
    const int64_t ones = __builtin_popcountll(window);
    if (count + ones > n) return 1;
    if (count + ones <= quick) {
      for (int64_t i = 0; i < ones; ++i, window &= window - 1, bit += parameter) {
        int64_t at = byte * 8 + __builtin_ctzll(window);
        uint64_t rest;
        std::memcpy(&rest, low + (bit >> 3), 8);
        uint64_t quotient = static_cast<uint64_t>(at - before - 1);
        uint64_t gap = (quotient << parameter) | ((rest >> (bit & 7)) & mask);
        longest = quotient > longest ? quotient : longest;  // a huge one may wrap around when it is shifted
        out[count + i] = static_cast<Index>(next + gap);
        next += gap + 1;
        before = at;
      }
    } else {
      for (int64_t i = 0; i < ones; ++i, window &= window - 1, bit += parameter) {
        int64_t at = byte * 8 + __builtin_ctzll(window);
        uint64_t quotient = static_cast<uint64_t>(at - before - 1);
        uint64_t gap = (quotient << parameter) | (parameter ? get_bits(low, low_nbytes, bit, parameter) : 0);
        longest = quotient > longest ? quotient : longest;
        out[count + i] = static_cast<Index>(next + gap);
        next += gap + 1;
        before = at;
      }
    }
    count += ones;
    outside |= next > numel;
  }
  if (count != n) return 1;
  if (longest > most) return 2;
  if (outside && wide_gap(rice, numel)) return 2;
  if ((before + 1 + 31) / 32 * 4 != nbytes) return 3;
  return outside ? 4 : 0;
}

THINWIRE_CLONES
int rice_indices_64(const Rice& rice, uint64_t numel, int64_t* out) { return rice_indices(rice, numel, out); }

THINWIRE_CLONES
int rice_indices_32(const Rice& rice, uint64_t numel, uint32_t* out) { return rice_indices(rice, numel, out); }

}  // namespace

// The Rice streams of several frames, each checked on its own; threads share the frames out. Indices have 64 bits where
// `wide`, else 32, and numel is then below 2**32.
THINWIRE_API void tw_rice_indices(int64_t num_frames, const uint64_t* lows, const int64_t* low_nbytes,
                                  const uint64_t* unaries, const int64_t* unary_nbytes, const int64_t* counts,
                                  const int32_t* parameters, int64_t numel, const uint64_t* outs, int wide,
                                  int32_t* faults, int threads) {
  int64_t entries = 0;
  for (int64_t f = 0; f < num_frames; ++f) entries += counts[f];
  thinwire::parallel(num_frames, entries < (1 << 14) ? 1 : threads, 1, [&](int, int64_t begin, int64_t end) {
    for (int64_t f = begin; f < end; ++f) {
      Rice rice{reinterpret_cast<const uint8_t*>(lows[f]), reinterpret_cast<const uint8_t*>(unaries[f]), low_nbytes[f],
                unary_nbytes[f], counts[f], parameters[f]};
      const auto limit = static_cast<uint64_t>(numel);
      faults[f] = wide ? rice_indices_64(rice, limit, reinterpret_cast<int64_t*>(outs[f]))
                       : rice_indices_32(rice, limit, reinterpret_cast<uint32_t*>(outs[f]));
    }
  }, 2);
}

// Of the functions of this library: raised when one takes other arguments or means something else.
THINWIRE_API int32_t tw_abi() { return 4; }

// Which version of the hot loops this machine runs.
THINWIRE_API const char* tw_vectors() {
#if THINWIRE_HAS_CLONES
  __builtin_cpu_init();
  if (__builtin_cpu_supports(THINWIRE_WIDE)) return "AVX-512";
  if (__builtin_cpu_supports(THINWIRE_MIDDLE)) return "AVX2";
#endif
  return "portable";
}
