// Small integers to bytes and back, lowest bit first.

#include <cstring>

#include "parallel.h"

namespace {

// Eight 0/1 bytes to one byte: the multiplication gathers the lowest bits of all eight at the top.
inline uint8_t gather_bits(uint64_t eight) { return static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56); }

inline void put_bits(uint8_t* out, int64_t at, uint32_t value, int bits) {
  int64_t byte = at >> 3;
  uint64_t shifted = static_cast<uint64_t>(value) << (at & 7);
  for (int done = -(static_cast<int>(at) & 7); done < bits; done += 8) {
    out[byte++] |= static_cast<uint8_t>(shifted);
    shifted >>= 8;
  }
}

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

// `out` must be zero; bits <= 32.
THINWIRE_API void tw_pack_uints(const int64_t* values, int64_t n, int bits, uint8_t* out) {
  for (int64_t i = 0; i < n; ++i) put_bits(out, i * bits, static_cast<uint32_t>(values[i]), bits);
}

THINWIRE_API void tw_unpack_uints(const uint8_t* packed, int64_t nbytes, int64_t n, int bits, int64_t* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = get_bits(packed, nbytes, i * bits, bits);
}

// Bits of all quotients in unary, for each Rice parameter of [first, first + choices).
THINWIRE_API void tw_rice_unary_bits(const int64_t* gaps, int64_t n, int first, int choices, int64_t* out) {
  for (int c = 0; c < choices; ++c) {
    int64_t sum = n;
    for (int64_t i = 0; i < n; ++i) sum += gaps[i] >> (first + c);
    out[c] = sum;
  }
}

// `low` and `unary` must be zero and large enough.
THINWIRE_API void tw_rice_encode(const int64_t* gaps, int64_t n, int parameter, uint8_t* low, uint8_t* unary) {
  const int64_t mask = (int64_t{1} << parameter) - 1;
  int64_t at = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (parameter) put_bits(low, i * parameter, static_cast<uint32_t>(gaps[i] & mask), parameter);
    at += (gaps[i] >> parameter) + 1;
    unary[at >> 3] |= static_cast<uint8_t>(1u << (at & 7));
  }
}

// Returns the number of entries in the unary stream; writes at most n gaps.
THINWIRE_API int64_t tw_rice_decode(const uint8_t* low, int64_t low_nbytes, const uint8_t* unary, int64_t unary_nbytes,
                                    int64_t n, int parameter, int64_t* out) {
  int64_t count = 0, before = -1;
  for (int64_t byte = 0; byte < unary_nbytes; byte += 8) {
    uint64_t window = 0;
    std::memcpy(&window, unary + byte, static_cast<size_t>(std::min<int64_t>(8, unary_nbytes - byte)));
    while (window) {
      int64_t at = byte * 8 + __builtin_ctzll(window);
      window &= window - 1;
      if (count < n) {
        uint64_t quotient = static_cast<uint64_t>(at - before - 1);
        uint32_t rest = parameter ? get_bits(low, low_nbytes, count * parameter, parameter) : 0;
        out[count] = static_cast<int64_t>((quotient << parameter) | rest);
      }
      ++count;
      before = at;
    }
  }
  return count;
}

// Which version of the hot loops this machine runs.
THINWIRE_API const char* tw_vectors() {
#if THINWIRE_HAS_CLONES
  __builtin_cpu_init();
  if (__builtin_cpu_supports("x86-64-v4")) return "AVX-512";
  if (__builtin_cpu_supports("x86-64-v3")) return "AVX2";
#endif
  return "portable";
}
