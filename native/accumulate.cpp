// One pass over memory: velocity, accumulation and the search for large elements.

#include <cmath>
#include <cstring>

#include "listing.h"
#include "parallel.h"

namespace {

constexpr int64_t kBlock = 128;  // small enough that a block without large elements is the rule

struct Segment {
  const float* grad;
  const float* weight;  // null without weight decay
  int64_t numel;
  int64_t start;  // of the segment in the flat state vectors
  float momentum;
  float decay;
  float applied;
  int32_t nesterov;
  float threshold;  // +inf: collect nothing here
  float ratio;      // of v before anything is added
};

// u = m u + d, v = v + (u - applied w), or v + (d + m u - applied w), d = g + decay w; without velocity v = v + g. Returns
// whether some |v| reaches the threshold; written as "not below", so that a nan does.
THINWIRE_CLONES
int update_block(const float* __restrict g, const float* __restrict w, float* __restrict u, float* __restrict v,
                 int64_t n, float m, float decay, float applied, int nesterov, float threshold) {
  int hit = 0;
  if (u == nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      v[i] += g[i];
      hit |= !(std::fabs(v[i]) < threshold);
    }
  } else if (w == nullptr && !nesterov) {
    for (int64_t i = 0; i < n; ++i) {
      u[i] = m * u[i] + g[i];
      v[i] += u[i];
      hit |= !(std::fabs(v[i]) < threshold);
    }
  } else if (w == nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      u[i] = m * u[i] + g[i];
      v[i] += g[i] + m * u[i];
      hit |= !(std::fabs(v[i]) < threshold);
    }
  } else if (!nesterov) {
    for (int64_t i = 0; i < n; ++i) {
      float d = g[i] + decay * w[i];
      u[i] = m * u[i] + d;
      v[i] += u[i] - applied * w[i];
      hit |= !(std::fabs(v[i]) < threshold);
    }
  } else {
    for (int64_t i = 0; i < n; ++i) {
      float d = g[i] + decay * w[i];
      u[i] = m * u[i] + d;
      v[i] += (d + m * u[i]) - applied * w[i];
      hit |= !(std::fabs(v[i]) < threshold);
    }
  }
  return hit;
}

THINWIRE_CLONES
void scale_block(float* v, int64_t n, float ratio) {
  for (int64_t i = 0; i < n; ++i) v[i] *= ratio;
}

// Writes the places, from `base` on, of the elements of a block that reach the threshold, and returns their number. One
// byte an element says whether it does, written with vectors; eight of them are looked at at once (lowest address, lowest
// byte: machines with the other order are not built for).
THINWIRE_CLONES
int64_t list_block(const float* v, int64_t n, float threshold, uint32_t base, uint32_t* places) {
  uint8_t reached[kBlock];
  for (int64_t i = 0; i < n; ++i) reached[i] = !(std::fabs(v[i]) < threshold);
  for (int64_t i = n; i < (n + 7) / 8 * 8; ++i) reached[i] = 0;
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += 8) {
    uint64_t eight;
    std::memcpy(&eight, reached + i, 8);
    for (; eight != 0; eight &= eight - 1)
      places[count++] = base + static_cast<uint32_t>(i + (__builtin_ctzll(eight) >> 3));
  }
  return count;
}

}  // namespace

namespace {

THINWIRE_CLONES
uint32_t largest_exponent(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    bits &= 0x7F800000u;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

}  // namespace

// The place of the first part that holds a nan or a magnitude of `limit` (a power of two or infinity) or more, or -1.
THINWIRE_API int64_t tw_first_nonfinite(int64_t num_parts, const uint64_t* parts, const int64_t* numels, float limit,
                                        int threads) {
  uint32_t limit_bits;
  std::memcpy(&limit_bits, &limit, 4);
  for (int64_t p = 0; p < num_parts; ++p) {
    const float* x = reinterpret_cast<const float*>(parts[p]);
    std::vector<uint32_t> largest(std::max(1, threads), 0);
    thinwire::parallel(numels[p], threads, 64, [&](int part, int64_t begin, int64_t end) {
      largest[part] = largest_exponent(x + begin, end - begin);
    });
    if (*std::max_element(largest.begin(), largest.end()) >= limit_bits) return p;
  }
  return -1;
}

// Multiplies v by the segments' ratios (may be null), updates u (may be null) and v from their gradients and lists, in
// rising order, the flat indices of elements that reach their segment's threshold. Returns their number, or -1 when they
// are more than `capacity`, or than the `room` for putting them in order holds (the update is done in any case).
THINWIRE_API int64_t tw_accumulate(int64_t num_segments, const uint64_t* grads, const uint64_t* weights,
                                   const int64_t* numels, const int64_t* starts, const float* momentum,
                                   const float* decay, const int32_t* nesterov, const float* applied,
                                   const float* thresholds, const float* ratios, float* u, float* v, uint32_t* room,
                                   int64_t room_entries, uint32_t* found, int64_t capacity, int threads) {
  std::vector<Segment> segments(num_segments);
  std::vector<int64_t> ends(num_segments);
  int64_t total = 0;
  for (int64_t s = 0; s < num_segments; ++s) {
    segments[s] = {reinterpret_cast<const float*>(grads[s]), reinterpret_cast<const float*>(weights[s]), numels[s],
                   starts[s], momentum[s], decay[s], applied[s], nesterov[s], thresholds[s],
                   ratios == nullptr ? 1.0f : ratios[s]};
    total += numels[s];
    ends[s] = total;
  }
  thinwire::Listing listing(room, room_entries, threads);
  thinwire::parallel(total, threads, kBlock, [&](int part, int64_t begin, int64_t end) {
    size_t s = std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin();
    for (int64_t at = begin; at < end; ++s) {
      const Segment& segment = segments[s];
      int64_t inside = at - (ends[s] - segment.numel);
      int64_t stop = std::min(segment.numel, inside + (end - at));
      at += stop - inside;
      float* us = u == nullptr ? nullptr : u + segment.start;
      float* vs = v + segment.start;
      for (int64_t i = inside; i < stop; i += kBlock) {
        int64_t n = std::min(kBlock, stop - i);
        const float* w = segment.weight == nullptr ? nullptr : segment.weight + i;
        // While the block is in the nearest cache, so that memory is read and written once.
        if (segment.ratio != 1.0f) scale_block(vs + i, n, segment.ratio);
        int hit = update_block(segment.grad + i, w, us == nullptr ? nullptr : us + i, vs + i, n, segment.momentum,
                               segment.decay, segment.applied, segment.nesterov, segment.threshold);
        // Beyond its room the list is of no use: only the update goes on.
        if (hit && !std::isinf(segment.threshold) && !listing.full()) {
          uint32_t places[kBlock];
          int64_t count = list_block(vs + i, n, segment.threshold, static_cast<uint32_t>(segment.start + i), places);
          listing.append(part, places, count);
        }
      }
    }
  });
  return listing.gather(found, capacity);
}

namespace {

// m = mu m + d, q = m (or d + mu m), or d alone; e = ratio e + q: the worker's side of dist-EF-blockSGDM in one pass.
THINWIRE_CLONES
void error_block(const float* __restrict g, const float* __restrict w, float* __restrict m, float* __restrict e,
                 int64_t n, float mu, float decay, int nesterov, float ratio) {
  if (mu == 0.0f) {
    if (w == nullptr)
      for (int64_t i = 0; i < n; ++i) e[i] = e[i] * ratio + g[i];
    else
      for (int64_t i = 0; i < n; ++i) e[i] = e[i] * ratio + (g[i] + decay * w[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    float d = w == nullptr ? g[i] : g[i] + decay * w[i];
    m[i] = mu * m[i] + d;
    e[i] = e[i] * ratio + (nesterov ? d + mu * m[i] : m[i]);
  }
}

}  // namespace

THINWIRE_API void tw_error_step(int64_t num_segments, const uint64_t* grads, const uint64_t* weights,
                                const int64_t* numels, const int64_t* starts, const float* momentum, const float* decay,
                                const int32_t* nesterov, const float* ratios, float* m, float* e, int threads) {
  for (int64_t s = 0; s < num_segments; ++s) {
    const float* g = reinterpret_cast<const float*>(grads[s]);
    const float* w = reinterpret_cast<const float*>(weights[s]);
    float* ms = m == nullptr ? nullptr : m + starts[s];
    float* es = e + starts[s];
    thinwire::parallel(numels[s], threads, 1024, [&](int, int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i += 1024) {
        int64_t n = std::min<int64_t>(1024, end - i);
        error_block(g + i, w == nullptr ? nullptr : w + i, ms == nullptr ? nullptr : ms + i, es + i, n, momentum[s],
                    decay[s], nesterov[s], ratios[s]);
      }
    });
  }
}

namespace {

// Adds the entries from the i-th on whose index is below `stop` to the floats at base + 4 * index; returns the next i.
int64_t add_run(const uint32_t* __restrict index, const float* __restrict value, int64_t i, int64_t count, int64_t stop,
                uint64_t base, float scale) {
  constexpr int64_t kAhead = 16;  // entries lie far apart: their cache lines are asked for before they are needed
  for (; i < count && index[i] < stop; ++i) {
    __builtin_prefetch(reinterpret_cast<const void*>(base + 4 * uint64_t{index[i + kAhead < count ? i + kAhead : i]}), 1);
    *reinterpret_cast<float*>(base + 4 * uint64_t{index[i]}) += value[i] * scale;
  }
  return i;
}

}  // namespace

// parts[segment][index] += values * scale for every list of rising flat indices; each element gets its additions in the
// order of the lists. The segments lie at `starts` in the flat index space, in rising order; threads share that space out,
// and each goes through its part tile by tile, so that the lists find each other's pages.
THINWIRE_API void tw_scatter_add(int64_t num_segments, const uint64_t* parts, const int64_t* numels,
                                 const int64_t* starts, int64_t num_lists, const uint64_t* indices,
                                 const uint64_t* values, const int64_t* counts, float scale, int threads) {
  constexpr int64_t kTile = 1 << 16;
  if (num_segments == 0) return;
  int64_t total = 0, entries = 0;
  for (int64_t s = 0; s < num_segments; ++s) total = std::max(total, starts[s] + numels[s]);
  for (int64_t l = 0; l < num_lists; ++l) entries += counts[l];
  thinwire::parallel(total, entries < (1 << 14) ? 1 : threads, kTile, [&](int, int64_t begin, int64_t end) {
    struct Cursor {
      int64_t at, segment;
    };
    std::vector<Cursor> cursors(num_lists);
    for (int64_t l = 0; l < num_lists; ++l) {
      const uint32_t* index = reinterpret_cast<const uint32_t*>(indices[l]);
      cursors[l] = {std::lower_bound(index, index + counts[l], begin) - index, 0};
    }
    for (int64_t tile = begin; tile < end; tile += kTile) {
      const int64_t stop = std::min(end, tile + kTile);
      for (int64_t l = 0; l < num_lists; ++l) {
        const uint32_t* index = reinterpret_cast<const uint32_t*>(indices[l]);
        const float* value = reinterpret_cast<const float*>(values[l]);
        const int64_t count = counts[l];
        int64_t i = cursors[l].at, s = cursors[l].segment;
        while (i < count && index[i] < stop) {
          while (s + 1 < num_segments && index[i] >= starts[s] + numels[s]) ++s;
          i = add_run(index, value, i, count, std::min(stop, starts[s] + numels[s]), parts[s] - 4 * starts[s], scale);
        }
        cursors[l] = {i, s};
      }
    }
  });
}
