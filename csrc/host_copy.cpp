#include "host_copy.h"

#include <unistd.h>

#include <algorithm>

namespace tasuki {
namespace {

// Pinning has a high cost per call, and a mapping cannot grow, so small requests are rounded up.
constexpr size_t kSegmentStep = size_t{16} << 20;
// Copies are made in pieces, so that readers of the first need not wait for the last.
constexpr size_t kPiece = size_t{64} << 20;

size_t bytes_of(const std::vector<Range>& runs) {
  size_t bytes = 0;
  for (const Range& run : runs) bytes += run.bytes;
  return bytes;
}

size_t free_host_bytes() { return static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

bool are_same(const std::vector<Range>& one, const std::vector<Range>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                    [](const Range& a, const Range& b) { return a.offset == b.offset && a.bytes == b.bytes; });
}

}  // namespace

Status HostCopy::save(uintptr_t base, const std::vector<Range>& runs) {
  Status status;
  if (!are_same(runs, runs_)) {
    // Equal runs have equal places in host memory; others take the place of what is there.
    status = restore_constant(base);
    if (!status.ok()) return status;
    valid_.clear();
  }
  status = grow(bytes_of(runs));
  if (!status.ok()) return status;
  saved_.clear();
  runs_ = runs;
  size_t segment = 0, used = 0;
  for (const Range& run : runs) {
    for (size_t done = 0; done < run.bytes;) {
      if (used == segments_[segment].bytes) ++segment, used = 0;
      size_t bytes = std::min(run.bytes - done, segments_[segment].bytes - used);
      saved_.push_back({{run.offset + done, bytes}, segments_[segment].host + used});
      done += bytes, used += bytes;
    }
  }
  for (const Saved& piece : saved_) {
    for (const Range& part : valid_.missing_in(piece.range)) {
      for (size_t at = part.offset; at < part.end(); at += kPiece) {
        size_t copied = std::min(kPiece, part.end() - at);
        status = driver_.copy_to_host(device_, piece.host + (at - piece.range.offset), base + at, copied);
        if (!status.ok()) return status;
      }
    }
  }
  return {};
}

size_t HostCopy::missing_bytes(const std::vector<Range>& runs, size_t total_bytes) const {
  size_t needed_bytes = std::max(bytes_of(runs), total_bytes);
  return needed_bytes - std::min(needed_bytes, pinned_bytes_);
}

void HostCopy::adopt(void* host, size_t bytes) {
  segments_.push_back({static_cast<char*>(host), bytes});
  pinned_bytes_ += bytes;
}

Status pin(Driver& driver, int device, size_t bytes, void** host) {
  Status status = driver.pin(device, bytes, host);
  if (status.code == Code::out_of_memory) return no_room("a copy in pinned host memory", bytes, free_host_bytes());
  if (!status.ok()) status.message = "pinning " + readable(bytes) + " of host memory: " + status.message;
  return status;
}

Status HostCopy::restore(uintptr_t base, const std::vector<Range>& runs, const Reached& reached) {
  auto run = runs.begin();
  for (const Saved& piece : saved_) {
    while (run != runs.end() && run->end() <= piece.range.offset) ++run;
    for (auto live = run; live != runs.end() && live->offset < piece.range.end(); ++live) {
      size_t start = std::max(live->offset, piece.range.offset), end = std::min(live->end(), piece.range.end());
      for (size_t done = start; done < end; done += kPiece) {
        size_t bytes = std::min(kPiece, end - done);
        Status status = driver_.copy_from_host(device_, base + done, piece.host + (done - piece.range.offset), bytes);
        if (status.ok()) status = reached(base + done + bytes);
        if (!status.ok()) return status;
      }
    }
  }
  return {};
}

void HostCopy::release() {
  for (const Segment& segment : segments_) static_cast<void>(driver_.unpin(device_, segment.host, segment.bytes));
  segments_.clear();
  saved_.clear();
  valid_.clear();
  pinned_bytes_ = 0;
}

Status HostCopy::grow(size_t needed_bytes) {
  if (needed_bytes <= pinned_bytes_) return {};
  size_t bytes = (needed_bytes - pinned_bytes_ + kSegmentStep - 1) / kSegmentStep * kSegmentStep;
  void* host = nullptr;
  Status status = pin(driver_, device_, bytes, &host);
  if (status.ok()) adopt(host, bytes);
  return status;
}

}  // namespace tasuki
