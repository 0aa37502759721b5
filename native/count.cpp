// Runs one kernel on random data, for benchmarks/native_instructions.py: `count KERNEL NUMEL`. Not part of the library.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cmath>
#include <string>
#include <vector>

extern "C" {
int64_t tw_accumulate(int64_t num_segments, const uint64_t* grads, const uint64_t* weights, const int64_t* numels,
                      const int64_t* starts, const float* momentum, const float* decay, const int32_t* nesterov,
                      const float* applied, const float* thresholds, const float* ratios, float* u, float* v,
                      uint32_t* room, int64_t room_entries, uint32_t* found, int64_t capacity, int threads);
void tw_error_step(int64_t num_segments, const uint64_t* grads, const uint64_t* weights, const int64_t* numels,
                   const int64_t* starts, const float* momentum, const float* decay, const int32_t* nesterov,
                   const float* ratios, float* m, float* e, int threads);
void tw_blockwise_sign(const float* x, int64_t num_runs, const int64_t* lengths, const int64_t* counts, uint8_t* negative,
                       float* scales, int threads);
void tw_add_signs(float* out, const uint8_t* negative, const float* scales, int64_t num_runs, const int64_t* lengths,
                  const int64_t* counts, float factor, int threads);
void tw_pack_bits(const uint8_t* bits, int64_t n, uint8_t* out, int threads);
void tw_moments(int64_t num_segments, const uint64_t* parts, const int64_t* numels, float* deviations, float* largest,
                int threads);
void tw_ternarize_packed(int64_t num_segments, const uint64_t* parts, const int64_t* numels, const float* scales,
                         const float* limits, const uint32_t* keys, const int64_t* counters, uint8_t* out, int threads);
uint32_t tw_checksum(const uint32_t* words, int64_t n, uint32_t start);
void tw_select_scopes(const float* x, int64_t num_scopes, const int64_t* bounds, const int64_t* ks,
                      const uint32_t* candidates, int64_t count, uint32_t* scratch, int64_t entries, uint32_t* out,
                      int64_t* passed, float* smallest, int threads);
void tw_select_topk(const float* x, int64_t n, int64_t k, uint32_t* scratch, int64_t entries, uint32_t* out, float* smallest,
                    int threads);
void tw_select_chunks(const float* x, int64_t num_scopes, const int64_t* bounds, int64_t chunk, int64_t k,
                      const int64_t* lasts, uint32_t* out, int threads);
void tw_two_bit_encode(const float* values, int64_t n, uint16_t* levels, uint8_t* packed);
void tw_two_bit_decode(const uint16_t* levels, const uint8_t* packed, int64_t n, float* out);
void tw_merge_topk(const uint32_t* a, const float* a_values, int64_t a_count, const uint32_t* b, const float* b_values,
                   int64_t b_count, int64_t k, uint32_t* scratch, uint32_t* out, float* sums);
void tw_int8_quantize(const float* values, int64_t n, int8_t* codes, float* scales);
void tw_rice_encode_of(const uint32_t* indices, int64_t n, int parameter, uint8_t* low, uint8_t* unary);
void tw_rice_indices(int64_t num_frames, const uint64_t* lows, const int64_t* low_nbytes, const uint64_t* unaries,
                     const int64_t* unary_nbytes, const int64_t* counts, const int32_t* parameters, int64_t numel,
                     const uint64_t* outs, int wide, int32_t* faults, int threads);
void tw_scatter_add(int64_t num_segments, const uint64_t* parts, const int64_t* numels, const int64_t* starts,
                    int64_t num_lists, const uint64_t* indices, const uint64_t* values, const int64_t* counts, float scale,
                    int threads);
}

namespace {

uint64_t state = 1;

double uniform() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return static_cast<double>(state >> 11) * 0x1p-53;
}

template <typename T>
uint64_t address(const std::vector<T>& v) {
  return reinterpret_cast<uint64_t>(v.data());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string kernel = argv[1];
  const int64_t n = std::atoll(argv[2]), k = n / 100, parameter = 6;
  std::vector<float> g(n), u(n), v(n), values(k, 1.0f), pair(2);
  for (auto& x : g) x = static_cast<float>(uniform() - uniform());
  // One element in a hundred is chosen; gaps and their Rice streams of the same choice.
  std::vector<uint32_t> chosen(k), out(4 * k + 1024), room(4 * k + 2048);
  std::vector<int64_t> zeros(1, 0), numels(1, n), counts(1, k);
  const auto entries = static_cast<int64_t>(room.size());
  for (int64_t i = 0; i < k; ++i) chosen[i] = static_cast<uint32_t>(i * 100 + static_cast<int64_t>(uniform() * 99));
  std::vector<uint64_t> parts(1, address(g)), nothing(1, 0);
  std::vector<float> one(1, 1.0f), none(1, 0.0f), momentum(1, 0.9f), threshold(1, 0.9995f);
  std::vector<int32_t> plain(1, 0), parameters(1, static_cast<int32_t>(parameter)), fault(1, 0);
  std::vector<uint32_t> keys(1, 7);
  std::vector<uint8_t> bytes(n + 8), low(k * parameter / 8 + 8), unary(k, 0);
  std::vector<int64_t> single(1, 1);

  if (kernel == "tw_accumulate") {
    tw_accumulate(1, parts.data(), nothing.data(), numels.data(), zeros.data(), momentum.data(), none.data(), plain.data(),
                  none.data(), threshold.data(), nullptr, u.data(), v.data(), room.data(), entries, out.data(),
                  static_cast<int64_t>(out.size()), 1);
  } else if (kernel == "tw_error_step") {
    tw_error_step(1, parts.data(), nothing.data(), numels.data(), zeros.data(), momentum.data(), none.data(), plain.data(),
                  one.data(), u.data(), v.data(), 1);
  } else if (kernel == "tw_blockwise_sign") {
    tw_blockwise_sign(g.data(), 1, numels.data(), single.data(), bytes.data(), pair.data(), 1);
  } else if (kernel == "tw_add_signs") {
    tw_add_signs(v.data(), bytes.data(), one.data(), 1, numels.data(), single.data(), -1.0f, 1);
  } else if (kernel == "tw_pack_bits") {
    std::vector<uint8_t> packed(n / 8 + 1);
    tw_pack_bits(bytes.data(), n, packed.data(), 1);
  } else if (kernel == "tw_moments") {
    tw_moments(1, parts.data(), numels.data(), &pair[0], &pair[1], 1);
  } else if (kernel == "tw_ternarize_packed") {
    tw_ternarize_packed(1, parts.data(), numels.data(), one.data(), one.data(), keys.data(), zeros.data(), bytes.data(), 1);
  } else if (kernel == "tw_checksum") {
    tw_checksum(reinterpret_cast<const uint32_t*>(g.data()), n, 0);
  } else if (kernel == "tw_select_scopes") {
    std::vector<int64_t> bounds{0, n}, half(1, k / 2), passed(1);
    tw_select_scopes(g.data(), 1, bounds.data(), half.data(), chosen.data(), k, room.data(), entries, out.data(),
                     passed.data(), pair.data(), 1);
  } else if (kernel == "tw_select_topk") {
    tw_select_topk(g.data(), n, k, room.data(), entries, out.data(), pair.data(), 1);
  } else if (kernel == "tw_select_chunks") {
    std::vector<int64_t> bounds{0, n}, last{1};
    std::vector<uint32_t> picked(n);
    tw_select_chunks(g.data(), 1, bounds.data(), 4096, 64, last.data(), picked.data(), 1);
  } else if (kernel == "tw_two_bit_encode") {
    std::vector<uint16_t> levels(2 * (k / 64 + 1));
    tw_two_bit_encode(g.data(), k, levels.data(), bytes.data());
  } else if (kernel == "tw_two_bit_decode") {
    std::vector<uint16_t> levels(2 * (k / 64 + 1), 0x3F80);
    tw_two_bit_decode(levels.data(), bytes.data(), k, v.data());
  } else if (kernel == "tw_merge_topk") {
    std::vector<uint32_t> others(chosen);
    for (size_t i = 0; i < others.size(); i += 2) ++others[i];  // every second index is in both lists
    tw_merge_topk(chosen.data(), g.data(), k, others.data(), g.data() + k, k, k, room.data(), out.data(), v.data());
  } else if (kernel == "tw_int8_quantize") {
    tw_int8_quantize(g.data(), k, reinterpret_cast<int8_t*>(bytes.data()), v.data());
  } else if (kernel == "tw_rice_encode_of") {
    tw_rice_encode_of(chosen.data(), k, static_cast<int>(parameter), low.data(), unary.data());
  } else if (kernel == "tw_rice_indices") {
    tw_rice_encode_of(chosen.data(), k, static_cast<int>(parameter), low.data(), unary.data());
    int64_t bits = k;
    for (int64_t i = 0; i < k; ++i) bits += (i ? chosen[i] - chosen[i - 1] - 1 : chosen[0]) >> parameter;
    std::vector<int64_t> low_nbytes(1, (k * parameter + 7) / 8), unary_nbytes(1, (bits + 31) / 32 * 4);
    std::vector<uint64_t> lows(1, address(low)), unaries(1, address(unary)), outs(1, address(out));
    tw_rice_indices(1, lows.data(), low_nbytes.data(), unaries.data(), unary_nbytes.data(), counts.data(),
                    parameters.data(), n, outs.data(), 0, fault.data(), 1);
    if (fault[0]) return 3;
  } else if (kernel == "tw_scatter_add") {
    std::vector<uint64_t> lists(1, address(chosen)), floats(1, address(values));
    tw_scatter_add(1, parts.data(), numels.data(), zeros.data(), 1, lists.data(), floats.data(), counts.data(), 1.0f, 1);
  } else {
    std::fprintf(stderr, "no such kernel: %s\n", kernel.c_str());
    return 2;
  }
  return 0;
}
