// Splitting a range over a few threads. Threads are started per call: a call works for milliseconds, a start costs tens of
// microseconds, and nothing is left behind that a fork or an interpreter exit could trip over.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace thinwire {

constexpr int64_t kSerialBelow = 1 << 16;

// Runs a part in a thread of its own, or here where no more threads can be started. Not inlined: beside what handles errors
// the loops are compiled worse.
template <typename Part>
[[gnu::noinline]] void start(std::vector<std::thread>& others, const Part& part) {
  try {
    others.emplace_back(part);
  } catch (const std::system_error&) {
    part();
  }
}

// Calls work(part, begin, end) for consecutive parts of [0, n), one per thread while threads can be started; returns
// the number of parts. Below `serial_below` there is one part.
template <typename Work>
int parallel(int64_t n, int threads, int64_t align, const Work& work, int64_t serial_below = kSerialBelow) {
  int parts = n < serial_below ? 1 : std::max(1, threads);
  std::vector<int64_t> bounds(parts + 1, n);
  bounds[0] = 0;
  for (int p = 1; p < parts; ++p) bounds[p] = std::min(n, (n * p / parts + align - 1) / align * align);
  std::vector<std::thread> others;
  others.reserve(parts - 1);
  for (int p = 1; p < parts; ++p) start(others, [&, p] { work(p, bounds[p], bounds[p + 1]); });
  work(0, bounds[0], bounds[1]);
  for (auto& other : others) other.join();
  return parts;
}

}  // namespace thinwire

// Hot loops are compiled once a vector width and chosen when the library is loaded: too early for AddressSanitizer.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(THINWIRE_PORTABLE)
#define THINWIRE_HAS_CLONES 1
#if __GNUC__ >= 12
#define THINWIRE_WIDE "x86-64-v4"
#define THINWIRE_MIDDLE "x86-64-v3"
#define THINWIRE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else  // older compilers know no levels: without the other extensions of a level the loops are a little slower
#define THINWIRE_WIDE "avx512f"
#define THINWIRE_MIDDLE "avx2"
#define THINWIRE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define THINWIRE_CLONES
#define THINWIRE_HAS_CLONES 0
#endif

#define THINWIRE_API extern "C" __attribute__((visibility("default")))
