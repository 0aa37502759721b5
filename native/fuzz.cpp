// Fuzzes the kernels that read bytes from the wire; not part of the library. `python tests/fuzz/fuzz_frames.py --native`
// builds it with AddressSanitizer and UndefinedBehaviorSanitizer and runs it; every buffer is a heap block of exactly the
// size that the caller in thinwire/kernels/native would give, so that one byte read or written too far is found. Results
// are compared with slow code that is obviously right. Inputs that reach new edges of the library (-fsanitize-coverage=
// trace-pc) become seeds. With clang and -DTHINWIRE_LIBFUZZER -fsanitize=fuzzer the same entry point serves libFuzzer.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

extern "C" {
uint32_t tw_checksum(const uint32_t* words, int64_t n, uint32_t start);
void tw_add_signs(float* out, const uint8_t* negative, const float* scales, int64_t num_runs, const int64_t* lengths,
                  const int64_t* counts, float factor, int threads);
void tw_pack_bits(const uint8_t* bits, int64_t n, uint8_t* out, int threads);
void tw_unpack_bits(const uint8_t* packed, int64_t n, uint8_t* out, int threads);
void tw_pack_trits(const int8_t* trits, int64_t n, uint8_t* out, int threads);
void tw_unpack_trits(const uint8_t* packed, int64_t n, int8_t* out, int threads);
void tw_rice_unary_bits_of(const uint32_t* indices, int64_t n, int first, int choices, int64_t* out);
void tw_rice_encode_of(const uint32_t* indices, int64_t n, int parameter, uint8_t* low, uint8_t* unary);
void tw_rice_indices(int64_t num_frames, const uint64_t* lows, const int64_t* low_nbytes, const uint64_t* unaries,
                     const int64_t* unary_nbytes, const int64_t* counts, const int32_t* parameters, int64_t numel,
                     const uint64_t* outs, int wide, int32_t* faults, int threads);
void tw_add_mean_of_signs(float* out, int64_t num_frames, const uint64_t* packed, const uint64_t* scales, int64_t num_runs,
                          const int64_t* lengths, const int64_t* counts, int threads);
void tw_write_signs(int64_t num_parts, const uint64_t* parts, const int64_t* numels, const uint8_t* packed,
                    const float* scales, int64_t num_runs, const int64_t* lengths, const int64_t* counts, int threads);
void tw_sum_trits(int64_t num_frames, const uint64_t* packed, int64_t n, int bits, uint8_t* out, int threads);
int tw_write_levels(int64_t num_parts, const uint64_t* parts, const int64_t* numels, const float* scales,
                    const uint8_t* packed, int bits, int64_t ranks, int threads);
void tw_two_bit_encode(const float* values, int64_t n, uint16_t* levels, uint8_t* packed);
void tw_two_bit_decode(const uint16_t* levels, const uint8_t* packed, int64_t n, float* out);
void tw_scatter_add(int64_t num_segments, const uint64_t* parts, const int64_t* numels, const int64_t* starts,
                    int64_t num_lists, const uint64_t* indices, const uint64_t* values, const int64_t* counts, float scale,
                    int threads);
}

namespace {

using Bytes = std::vector<uint8_t>;

#define MUST(condition)                                                             \
  do {                                                                              \
    if (!(condition)) {                                                             \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                 \
    }                                                                               \
  } while (0)

// A heap block of exactly n elements: a null pointer for none, as an empty tensor has.
template <typename T>
struct Block {
  std::unique_ptr<T[]> memory;
  int64_t n;
  explicit Block(int64_t n) : memory(n ? new T[static_cast<size_t>(n)]() : nullptr), n(n) {}
  Block(const uint8_t* from, int64_t n) : Block(n) {
    if (n) std::memcpy(memory.get(), from, static_cast<size_t>(n) * sizeof(T));
  }
  T* get() const { return memory.get(); }
  T& operator[](int64_t i) const { return memory[static_cast<size_t>(i)]; }
};

int64_t bytes_of(int64_t bits) { return (bits + 7) / 8; }

int bit_at(const Block<uint8_t>& bytes, int64_t at) {
  return at / 8 < bytes.n ? bytes[at / 8] >> (at % 8) & 1 : 0;  // behind the end a stream goes on with zeros
}

uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

// The rest of an input, taken piece by piece; zeros when it is used up.
struct Input {
  const uint8_t* data;
  int64_t left;
  uint8_t byte() { return left > 0 ? (--left, *data++) : 0; }
  uint32_t number(uint32_t below) { return (byte() | byte() << 8 | static_cast<uint32_t>(byte()) << 16) % below; }
};

// Most inputs are short; some are repeated until the work is split over threads.
Block<uint8_t> payload(Input& in, bool large) {
  if (!large || in.left == 0) return Block<uint8_t>(in.data, in.left);
  Block<uint8_t> out(20000);
  for (int64_t i = 0; i < out.n; ++i) out[i] = in.data[i % in.left];
  return out;
}

void check_bits(Input& in, int threads, bool large) {
  uint8_t cut = in.byte() % 8;
  Block<uint8_t> packed = payload(in, large);
  int64_t n = packed.n ? packed.n * 8 - cut : 0;
  Block<uint8_t> bits(n), again(bytes_of(n));
  tw_unpack_bits(packed.get(), n, bits.get(), threads);
  for (int64_t i = 0; i < n; ++i) MUST(bits[i] == bit_at(packed, i));
  tw_pack_bits(bits.get(), n, again.get(), threads);
  for (int64_t i = 0; i < n; ++i) MUST(bit_at(again, i) == bits[i]);
  // A sign frame that was read is added to a vector, one scale per block; lengths are the receiver's own.
  int64_t length = 1 + in.number(40);
  Block<int64_t> lengths(2), counts(2);
  lengths[0] = length, counts[0] = n / length, lengths[1] = n % length, counts[1] = n % length ? 1 : 0;
  Block<float> scales(counts[0] + counts[1]), out(n);
  for (int64_t i = 0; i < scales.n; ++i) std::memcpy(&scales[i], &packed[(i * 4) % (packed.n > 4 ? packed.n - 3 : 1)],
                                                     packed.n >= 4 ? 4 : 0);
  tw_add_signs(out.get(), bits.get(), scales.get(), counts[1] ? 2 : 1, lengths.get(), counts.get(), 0.5f, threads);
  // The same without the bits in between: written to two vectors, and two frames averaged.
  int64_t half = n / 3;
  Block<float> first(half), second(n - half);
  const uint64_t parts[2] = {reinterpret_cast<uint64_t>(first.get()), reinterpret_cast<uint64_t>(second.get())};
  const int64_t numels[2] = {half, n - half};
  tw_write_signs(2, parts, numels, packed.get(), scales.get(), counts[1] ? 2 : 1, lengths.get(), counts.get(), threads);
  for (int64_t i = 0; i < n; ++i) {
    float scale = scales[i / length], value = i < half ? first[i] : second[i - half];
    MUST(std::isnan(scale) || value == (bits[i] ? -scale : scale));
  }
  const uint64_t frames[2] = {reinterpret_cast<uint64_t>(packed.get()), reinterpret_cast<uint64_t>(again.get())};
  const uint64_t owns[2] = {reinterpret_cast<uint64_t>(scales.get()), reinterpret_cast<uint64_t>(scales.get())};
  tw_add_mean_of_signs(out.get(), 2, frames, owns, counts[1] ? 2 : 1, lengths.get(), counts.get(), threads);
}

void check_trits(Input& in, int threads, bool large) {
  uint8_t cut = in.byte() % 5;
  Block<uint8_t> packed = payload(in, large);  // bytes above 242 are refused before; they must do no harm
  int64_t n = packed.n ? packed.n * 5 - cut : 0;
  Block<int8_t> trits(n);
  Block<uint8_t> again((n + 4) / 5);
  tw_unpack_trits(packed.get(), n, trits.get(), threads);
  for (int64_t i = 0, rest = 0; i < n; ++i, rest /= 3) {
    if (i % 5 == 0) rest = packed[i / 5];
    MUST(trits[i] == rest % 3 - 1);
  }
  tw_pack_trits(trits.get(), n, again.get(), threads);
  for (int64_t i = 0; i < n / 5; ++i) MUST(packed[i] > 242 || again[i] == packed[i]);
  // Three frames summed up, and the answer read into two vectors.
  const uint64_t frame = reinterpret_cast<uint64_t>(packed.get()), frames[3] = {frame, frame, frame};
  Block<uint8_t> levels(bytes_of(n * 3));
  tw_sum_trits(3, frames, n, 3, levels.get(), threads);
  int64_t half = n / 3;
  Block<float> first(half), second(n - half);
  const uint64_t parts[2] = {reinterpret_cast<uint64_t>(first.get()), reinterpret_cast<uint64_t>(second.get())};
  const int64_t numels[2] = {half, n - half};
  const float scales[2] = {2.0f, 4.0f};
  MUST(tw_write_levels(2, parts, numels, scales, levels.get(), 3, 3, threads) == 1);
  for (int64_t i = 0; i < n; ++i) MUST((i < half ? first[i] / 2 : second[i - half] / 4) == trits[i]);
  if (n) tw_write_levels(2, parts, numels, scales, packed.get(), 1, 1, threads);  // levels that nobody summed up
}

// The entries of a frame whose indices were checked, added where they belong: parts of any size, empty ones too.
void scatter(Input in, const Block<uint32_t>& indices, int64_t numel) {
  std::vector<int64_t> sizes;
  for (int64_t left = numel; left > 0 && sizes.size() < 9;) {
    sizes.push_back(sizes.size() == 8 ? left : in.number(4) == 0 ? 0 : 1 + in.number(static_cast<uint32_t>(left)));
    left -= sizes.back();
  }
  std::vector<Block<float>> parts;
  Block<uint64_t> pointers(static_cast<int64_t>(sizes.size()));
  Block<int64_t> numels(pointers.n), starts(pointers.n);
  int64_t start = 0;
  for (int64_t s = 0; s < pointers.n; ++s) {
    numels[s] = sizes[static_cast<size_t>(s)], starts[s] = start, start += numels[s];
    parts.emplace_back(numels[s]);
    pointers[s] = reinterpret_cast<uint64_t>(parts.back().get());
  }
  MUST(start == numel);
  Block<float> values(indices.n);
  for (int64_t i = 0; i < values.n; ++i) values[i] = static_cast<float>(i + 1);
  // The same list twice: every element gets both additions.
  Block<uint64_t> lists(2), floats(2);
  Block<int64_t> counts(2);
  lists[0] = lists[1] = reinterpret_cast<uint64_t>(indices.get());
  floats[0] = floats[1] = reinterpret_cast<uint64_t>(values.get());
  counts[0] = counts[1] = indices.n;
  tw_scatter_add(pointers.n, pointers.get(), numels.get(), starts.get(), 2, lists.get(), floats.get(), counts.get(), 0.25f,
                 1 + static_cast<int>(in.number(3)));
  int64_t next = 0;
  for (int64_t s = 0; s < pointers.n; ++s)
    for (int64_t i = 0; i < numels[s]; ++i) {
      bool hit = next < indices.n && indices[next] == starts[s] + i;
      MUST(parts[static_cast<size_t>(s)][i] == (hit ? 0.5f * static_cast<float>(++next) : 0.0f));
    }
  MUST(next == indices.n);
}

// The decoder gives the indices that these gaps imply, and finds the same things wrong, in the same order.
void check_rice_indices(const Block<uint8_t>& low, const Block<uint8_t>& unary, int64_t n, int parameter, int64_t numel,
                        int64_t ones, const Block<int64_t>& gaps, int threads) {
  Block<int64_t> out(n), other(n), low_nbytes(2), unary_nbytes(2), counts(2);
  Block<uint32_t> narrow(n), narrow_other(n);
  Block<uint64_t> lows(2), unaries(2), outs(2);
  Block<int32_t> parameters(2), faults(2);
  for (int64_t f = 0; f < 2; ++f) {
    lows[f] = reinterpret_cast<uint64_t>(low.get()), low_nbytes[f] = low.n;
    unaries[f] = reinterpret_cast<uint64_t>(unary.get()), unary_nbytes[f] = unary.n;
    counts[f] = n, parameters[f] = parameter;
    outs[f] = reinterpret_cast<uint64_t>(f ? other.get() : out.get());
  }
  tw_rice_indices(2, lows.get(), low_nbytes.get(), unaries.get(), unary_nbytes.get(), counts.get(), parameters.get(), numel,
                  outs.get(), 1, faults.get(), threads);
  MUST(faults[0] == faults[1]);
  const int32_t fault = faults[0];
  outs[0] = reinterpret_cast<uint64_t>(narrow.get()), outs[1] = reinterpret_cast<uint64_t>(narrow_other.get());
  tw_rice_indices(2, lows.get(), low_nbytes.get(), unaries.get(), unary_nbytes.get(), counts.get(), parameters.get(), numel,
                  outs.get(), 0, faults.get(), threads);
  MUST(faults[0] == fault && faults[1] == fault);
  for (int64_t i = 0; i < n && !fault; ++i) MUST(narrow[i] == out[i] && narrow_other[i] == out[i]);
  int32_t expected = ones != n ? 1 : 0;
  int64_t index = -1, bits = 0;
  for (int64_t i = 0; i < n && !expected; ++i) {
    if (gaps[i] < 0 || gaps[i] >= numel) expected = 2;
    bits += (gaps[i] >> parameter) + 1;
  }
  if (!expected && (bits + 31) / 32 * 4 != unary.n) expected = 3;
  for (int64_t i = 0; i < n && !expected; ++i) MUST(out[i] == (index += gaps[i] + 1) && other[i] == index);
  if (!expected && index >= numel) expected = 4;
  MUST(faults[0] == expected);
}

// As decode_indices in thinwire/codecs/indices.py: decode, check, and only then use.
void check_rice(Input& in, int threads) {
  int parameter = in.byte() % 31;
  int64_t n = in.number(600);
  bool room = in.byte() & 1;
  int64_t low_nbytes = std::min(in.left, room ? bytes_of(n * parameter) : static_cast<int64_t>(in.byte()));
  Block<uint8_t> low(in.data, low_nbytes), unary(in.data + low_nbytes, in.left - low_nbytes);
  int64_t ones = 0;
  for (int64_t i = 0; i < unary.n * 8; ++i) ones += bit_at(unary, i);
  if (in.byte() & 1) n = ones;  // otherwise nearly all inputs would be refused here
  Block<int64_t> gaps(n);
  for (int64_t i = 0, at = 0; i < std::min(n, ones); ++i, ++at) {  // bit by bit, as docs/wire-format.md has it
    uint64_t gap = 0;
    while (!bit_at(unary, at)) ++at, ++gap;
    gap <<= parameter;
    for (int b = 0; b < parameter; ++b) gap |= static_cast<uint64_t>(bit_at(low, i * parameter + b)) << b;
    gaps[i] = static_cast<int64_t>(gap);
  }
  int64_t numel = 1 + in.number(50000), index = -1, bits = 0;
  check_rice_indices(low, unary, n, parameter, numel, ones, gaps, threads);
  if (ones != n) return;
  Block<uint32_t> indices(n);
  for (int64_t i = 0; i < n; ++i) {
    if (gaps[i] < 0 || gaps[i] >= numel) return;
    indices[i] = static_cast<uint32_t>(index += gaps[i] + 1);
  }
  tw_rice_unary_bits_of(indices.get(), n, parameter, 1, &bits);
  int64_t expected = 0;
  for (int64_t i = 0; i < n; ++i) expected += (gaps[i] >> parameter) + 1;
  MUST(bits == expected && bytes_of(bits) <= unary.n);
  Block<uint8_t> low_again(bytes_of(n * parameter)), unary_again(bytes_of(bits));
  tw_rice_encode_of(indices.get(), n, parameter, low_again.get(), unary_again.get());
  for (int64_t i = 0; i < bits; ++i) MUST(bit_at(unary_again, i) == bit_at(unary, i));
  for (int64_t i = 0; i < n * parameter; ++i) MUST(bit_at(low_again, i) == bit_at(low, i));
  if (index < numel) scatter(in, indices, numel);
}

void check_scatter(Input& in) {
  int64_t numel = 1 + in.number(5000);
  std::vector<uint32_t> chosen;
  for (int64_t index = in.number(64); index < numel && in.left > 0; index += 1 + in.byte())
    chosen.push_back(static_cast<uint32_t>(index));
  Block<uint32_t> indices(reinterpret_cast<const uint8_t*>(chosen.data()), static_cast<int64_t>(chosen.size()));
  scatter(in, indices, numel);
}

// Codes and levels as they come, read bit by bit; and coded again, where what was read is finite.
void check_two_bits(Input& in) {
  uint8_t cut = in.byte() % 4;
  const int64_t bytes = in.left / 2, chunks = (4 * bytes + 63) / 64;
  Block<uint8_t> packed(in.data, bytes), again(bytes);
  const int64_t n = bytes ? 4 * bytes - cut : 0;
  Block<uint16_t> levels((n + 63) / 64 * 2), new_levels(levels.n);
  MUST(levels.n <= 2 * chunks);
  if (levels.n) std::memcpy(levels.get(), in.data + bytes, static_cast<size_t>(std::min(in.left - bytes, 2 * levels.n)));
  Block<float> out(n), other(n);
  tw_two_bit_decode(levels.get(), packed.get(), n, out.get());
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits, expected = static_cast<uint32_t>(levels[i / 64 * 2 + bit_at(packed, 2 * i)]) << 16;
    expected ^= static_cast<uint32_t>(bit_at(packed, 2 * i + 1)) << 31;
    std::memcpy(&bits, out.get() + i, 4);
    MUST(bits == expected);
  }
  tw_two_bit_encode(out.get(), n, new_levels.get(), again.get());
  tw_two_bit_decode(new_levels.get(), again.get(), n, other.get());
  for (int64_t i = 0; i < n; ++i) {
    bool finite = true;
    for (int64_t j = i / 64 * 64; j < std::min(n, i / 64 * 64 + 64); ++j) finite = finite && std::isfinite(out[j]);
    MUST(finite == std::isfinite(other[i]));
    MUST(!finite || other[i] == 0 || (other[i] < 0) == (out[i] < 0));
  }
}

void check_checksum(Input& in) {
  uint32_t start = in.number(1 << 24) << 8 | in.byte(), expected = 0;
  Block<uint32_t> words(in.data, in.left / 4);
  for (int64_t i = 0; i < words.n; ++i) expected += mix(mix(start + static_cast<uint32_t>(i)) ^ words[i]);
  MUST(tw_checksum(words.get(), words.n, start) == expected);
}

void run(const uint8_t* data, size_t size) {
  Input in{data, static_cast<int64_t>(size)};
  uint8_t choice = in.byte(), how = in.byte();
  int threads = how % 4;
  bool large = how >= 252;
  switch (choice % 6) {
    case 0: return check_bits(in, threads, large);
    case 1: return check_trits(in, threads, large);
    case 2: return check_rice(in, threads);
    case 3: return check_scatter(in);
    case 4: return check_two_bits(in);
    default: return check_checksum(in);
  }
}

}  // namespace

#ifdef THINWIRE_LIBFUZZER

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  run(data, size);
  return 0;
}

#else

namespace {

std::atomic<uint8_t> edges[1 << 16];
std::atomic<int> new_edges{0};
thread_local uintptr_t last_edge = 0;

uint64_t state = 1;

uint64_t random_bits() {  // splitmix64
  uint64_t x = state += 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}

size_t random_below(size_t n) { return n ? static_cast<size_t>(random_bits() % n) : 0; }

uint8_t random_byte() {
  static const uint8_t telling[] = {0, 1, 2, 7, 8, 15, 16, 30, 31, 32, 127, 128, 242, 243, 254, 255};
  return random_bits() & 1 ? telling[random_below(sizeof telling)] : static_cast<uint8_t>(random_bits());
}

void mutate(Bytes& bytes, const Bytes& other) {
  for (size_t change = 1 + random_below(4); change--;) {
    size_t at = random_below(bytes.size());
    auto place = bytes.begin() + static_cast<int64_t>(at);
    switch (random_below(7)) {
      case 0:
        if (!bytes.empty()) bytes[at] ^= static_cast<uint8_t>(1u << random_below(8));
        break;
      case 1:
        if (!bytes.empty()) bytes[at] = random_byte();
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3:
        bytes.insert(place, random_below(32), random_byte());
        break;
      case 4:
        for (size_t i = random_below(64); i--;) bytes.push_back(static_cast<uint8_t>(random_bits()));
        break;
      case 5: {  // splice
        size_t from = random_below(other.size()), n = std::min(random_below(64), other.size() - from);
        bytes.insert(place, other.begin() + static_cast<int64_t>(from), other.begin() + static_cast<int64_t>(from + n));
        break;
      }
      default:
        for (size_t i = at; i < std::min(bytes.size(), at + 16); ++i) bytes[i] = random_byte();
    }
  }
  if (bytes.size() > 4096) bytes.resize(4096);
}

}  // namespace

// Called at every basic block of the library's files, which alone are built with trace-pc.
extern "C" void __sanitizer_cov_trace_pc() {
  uintptr_t here = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  uintptr_t edge = (here ^ last_edge << 1) & 0xFFFF;
  if (!edges[edge].load(std::memory_order_relaxed) && !edges[edge].exchange(1)) ++new_edges;
  last_edge = here;
}

// fuzz COUNT [SEED [SECONDS]]
int main(int argc, char** argv) {
  uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100000;
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  double limit = argc > 3 ? std::atof(argv[3]) : 1e9;
  state = seed;
  std::vector<Bytes> corpus;
  for (uint8_t choice = 0; choice < 6; ++choice)
    for (size_t size : {2, 40, 400}) {
      Bytes bytes{choice, static_cast<uint8_t>(random_bits())};
      while (bytes.size() < size) bytes.push_back(static_cast<uint8_t>(random_bits()));
      corpus.push_back(bytes);
    }
  auto begin = std::chrono::steady_clock::now();
  auto seconds = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  uint64_t done = 0;
  int known = 0;
  for (; done < count && (done % 256 || seconds() < limit); ++done) {
    Bytes bytes = corpus[random_below(corpus.size())];
    if (done >= corpus.size()) mutate(bytes, corpus[random_below(corpus.size())]);
    Block<uint8_t> exact(bytes.data(), static_cast<int64_t>(bytes.size()));
    run(exact.get(), bytes.size());
    if (new_edges > known) known = new_edges, corpus.push_back(bytes);
  }
  std::printf("{\"inputs\": %llu, \"seed\": %llu, \"seconds\": %.2f, \"edges\": %d, \"seeds_kept\": %zu}\n",
              static_cast<unsigned long long>(done), static_cast<unsigned long long>(seed), seconds(), known,
              corpus.size());
  return 0;
}

#endif
