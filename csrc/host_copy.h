// An arena's content during a pause: pinned host memory, allocated once and kept for later pauses.
#pragma once

#include <functional>
#include <vector>

#include "blocks.h"
#include "driver.h"
#include "ranges.h"

namespace tasuki {

class HostCopy {
 public:
  HostCopy(Driver& driver, int device) : driver_(driver), device_(device) {}
  ~HostCopy() { release(); }
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  // Starts copying `runs` of the arena at `base`, except bytes kept before; pins more memory first if needed.
  Status save(uintptr_t base, const std::vector<Range>& runs);
  // The copies of the last save have arrived: those of `constant` are kept, whatever happens to the arena's bytes.
  void keep(const Ranges& constant) { valid_ = constant; }
  bool keeps(const Ranges& constant) const { return valid_ == constant; }
  // Starts copying back the bytes that are kept.
  Status restore_constant(uintptr_t base) {
    return restore(base, valid_.all(), [](uintptr_t) { return Status{}; });
  }
  // Memory that a save of `runs`, or of that many bytes, would have to pin first.
  size_t missing_bytes(const std::vector<Range>& runs, size_t total_bytes) const;
  // Memory pinned by another thread, for the next saves.
  void adopt(void* host, size_t bytes);
  // Marks the saved copy of `range` as outdated.
  void forget(const Range& range) { valid_.remove(range); }
  // Receives the address up to which copies have been started.
  using Reached = std::function<Status(uintptr_t end)>;
  // Starts copying back the saved bytes still covered by `runs`, by ascending address, and calls `reached` after every piece.
  Status restore(uintptr_t base, const std::vector<Range>& runs, const Reached& reached);
  // Frees the pinned memory; the saved content is lost.
  void release();

  size_t pinned_bytes() const { return pinned_bytes_; }

 private:
  struct Segment {
    char* host;
    size_t bytes;
  };
  struct Saved {
    Range range;
    char* host;
  };

  Status grow(size_t needed_bytes);

  Driver& driver_;
  int device_;
  std::vector<Segment> segments_;
  std::vector<Saved> saved_;
  std::vector<Range> runs_;  // saved last
  Ranges valid_;             // bytes whose copy is kept
  size_t pinned_bytes_ = 0;
};

// Pins host memory. Reports the numbers if there is not enough.
Status pin(Driver& driver, int device, size_t bytes, void** host);

}  // namespace tasuki
