// Rising lists of places that several threads write at once, in memory that the caller gives.
#pragma once

#include <atomic>
#include <cstring>

#include "parallel.h"

namespace thinwire {

// Every thread lists the places of its own part of a range. How many they will be is not known beforehand, so threads
// take blocks of the room as they need them; `gather` then puts the blocks into the order of the range.
class Listing {
 public:
  static constexpr int64_t kBlock = 256;  // entries

  Listing(uint32_t* room, int64_t entries, int threads)
      : room_(room), blocks_(entries / kBlock), parts_(std::max(1, threads)) {}

  // False when there is no room left: what follows is of no use then.
  bool append(int part, const uint32_t* places, int64_t count) {
    Part& mine = parts_[part];
    while (count > 0) {
      if (mine.left == 0 && !extend(mine)) return false;
      const int64_t now = std::min(count, mine.left);
      std::memcpy(mine.next, places, static_cast<size_t>(now) * sizeof(uint32_t));
      mine.next += now;
      mine.left -= now;
      places += now;
      count -= now;
    }
    return true;
  }

  bool full() const { return full_.load(std::memory_order_relaxed); }

  // All places, rising, into `out`; returns their number, or -1 when they are more than `capacity` or than there was
  // room for.
  int64_t gather(uint32_t* out, int64_t capacity) const {
    int64_t count = 0;
    for (const Part& part : parts_) count += static_cast<int64_t>(part.blocks.size()) * kBlock - part.left;
    if (full() || count > capacity) return -1;
    for (const Part& part : parts_) {
      for (size_t b = 0; b < part.blocks.size(); ++b) {
        const int64_t filled = b + 1 < part.blocks.size() ? kBlock : kBlock - part.left;
        std::memcpy(out, room_ + part.blocks[b] * kBlock, static_cast<size_t>(filled) * sizeof(uint32_t));
        out += filled;
      }
    }
    return count;
  }

 private:
  struct alignas(64) Part {
    std::vector<int64_t> blocks;
    uint32_t* next = nullptr;
    int64_t left = 0;  // entries in the last block
  };

  bool extend(Part& part) {
    const int64_t block = taken_.fetch_add(1, std::memory_order_relaxed);
    if (block >= blocks_) {
      full_.store(true, std::memory_order_relaxed);
      return false;
    }
    part.blocks.push_back(block);
    part.next = room_ + block * kBlock;
    part.left = kBlock;
    return true;
  }

  uint32_t* room_;
  int64_t blocks_;
  std::atomic<int64_t> taken_{0};
  std::atomic<bool> full_{false};
  std::vector<Part> parts_;
};

}  // namespace thinwire
