// An arena's content while it is paused: pinned host memory that is taken once and kept for the next pause.
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
  ~HostCopy() { drop(); }
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  // Starts copying `runs` of the arena at `base`; takes more pinned memory first when the old does not suffice. Bytes of `constant` are
  // copied the first time only.
  Status save(uintptr_t base, const std::vector<Range>& runs, const Ranges& constant);
  // Of memory that a save of `runs`, or of so many bytes, would have to pin first.
  size_t missing_bytes(const std::vector<Range>& runs, size_t total_bytes) const;
  // Memory that somebody else has pinned: the next saves use it.
  void adopt(void* host, size_t bytes);
  // What was saved of `range` is no longer right.
  void forget(const Range& range) { valid_.remove(range); }
  void forget() { valid_.clear(); }
  // Gets the address up to which copies have been started.
  using Reached = std::function<Status(uintptr_t end)>;
  // Starts copying back those saved bytes that `runs` still covers, by rising addresses, and calls `reached` behind every piece.
  Status restore(uintptr_t base, const std::vector<Range>& runs, const Reached& reached);
  // Gives the pinned memory back; the saved content is lost.
  void drop();

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
  std::vector<Range> runs_;  // that were saved last
  Ranges valid_;             // bytes whose copy is still right
  size_t pinned_bytes_ = 0;
};

// Pins host memory. Says with numbers when there is none.
Status pin(Driver& driver, int device, size_t bytes, void** host);

}  // namespace tasuki
