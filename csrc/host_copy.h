// An arena's content while it is paused: pinned host memory that is taken once and kept for the next pause.
#pragma once

#include <vector>

#include "blocks.h"
#include "driver.h"

namespace tasuki {

class HostCopy {
 public:
  HostCopy(Driver& driver, int device) : driver_(driver), device_(device) {}
  ~HostCopy() { drop(); }
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  // Starts copying `runs` of the arena at `base`; takes more pinned memory first when the old does not suffice.
  Status save(uintptr_t base, const std::vector<Range>& runs);
  // Starts copying back those saved bytes that `runs` still covers.
  Status restore(uintptr_t base, const std::vector<Range>& runs);
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
  size_t pinned_bytes_ = 0;
};

}  // namespace tasuki
