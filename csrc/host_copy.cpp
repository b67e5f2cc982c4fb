#include "host_copy.h"

#include <algorithm>

namespace tasuki {
namespace {

// Pinning is slow per call and a mapping cannot grow, so small wants are rounded up.
constexpr size_t kSegmentStep = size_t{16} << 20;

}  // namespace

Status HostCopy::save(uintptr_t base, const std::vector<Range>& runs) {
  size_t needed_bytes = 0;
  for (const Range& run : runs) needed_bytes += run.bytes;
  Status status = grow(needed_bytes);
  if (!status.ok()) return status;
  saved_.clear();
  size_t segment = 0, used = 0;
  for (const Range& run : runs) {
    for (size_t done = 0; done < run.bytes;) {
      if (used == segments_[segment].bytes) ++segment, used = 0;
      size_t bytes = std::min(run.bytes - done, segments_[segment].bytes - used);
      Saved piece{{run.offset + done, bytes}, segments_[segment].host + used};
      status = driver_.copy_to_host(device_, piece.host, base + piece.range.offset, bytes);
      if (!status.ok()) return status;
      saved_.push_back(piece);
      done += bytes, used += bytes;
    }
  }
  return {};
}

Status HostCopy::restore(uintptr_t base, const std::vector<Range>& runs) {
  auto run = runs.begin();
  for (const Saved& piece : saved_) {
    while (run != runs.end() && run->end() <= piece.range.offset) ++run;
    for (auto live = run; live != runs.end() && live->offset < piece.range.end(); ++live) {
      size_t start = std::max(live->offset, piece.range.offset), end = std::min(live->end(), piece.range.end());
      Status status = driver_.copy_from_host(device_, base + start, piece.host + (start - piece.range.offset), end - start);
      if (!status.ok()) return status;
    }
  }
  return {};
}

void HostCopy::drop() {
  for (const Segment& segment : segments_) static_cast<void>(driver_.unpin(device_, segment.host, segment.bytes));
  segments_.clear();
  saved_.clear();
  pinned_bytes_ = 0;
}

Status HostCopy::grow(size_t needed_bytes) {
  if (needed_bytes <= pinned_bytes_) return {};
  size_t bytes = (needed_bytes - pinned_bytes_ + kSegmentStep - 1) / kSegmentStep * kSegmentStep;
  void* host = nullptr;
  Status status = driver_.pin(device_, bytes, &host);
  if (!status.ok()) return status.message = "pinning " + readable(bytes) + " of host memory: " + status.message, status;
  segments_.push_back({static_cast<char*>(host), bytes});
  pinned_bytes_ += bytes;
  return {};
}

}  // namespace tasuki
