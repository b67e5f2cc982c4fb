// A set of bytes as disjoint ranges.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <vector>

namespace tasuki {

struct Range {
  size_t offset;
  size_t bytes;

  size_t end() const { return offset + bytes; }
  bool overlaps(const Range& other) const { return offset < other.end() && other.offset < end(); }
};

class Ranges {
 public:
  void add(Range range) {
    auto at = ends_.upper_bound(range.offset);
    if (at != ends_.begin() && std::prev(at)->second >= range.offset) --at;
    size_t start = range.offset, end = range.end();
    while (at != ends_.end() && at->first <= range.end()) {
      start = std::min(start, at->first), end = std::max(end, at->second);
      at = ends_.erase(at);
    }
    if (end > start) ends_[start] = end;
  }

  void remove(const Range& range) {
    std::vector<Range> left;
    for (auto at = first_after(range.offset); at != ends_.end() && at->first < range.end();) {
      if (at->first < range.offset) left.push_back({at->first, range.offset - at->first});
      if (at->second > range.end()) left.push_back({range.end(), at->second - range.end()});
      at = ends_.erase(at);
    }
    for (const Range& rest : left) ends_[rest.offset] = rest.end();
  }

  // The parts of `range` outside the set, in order.
  std::vector<Range> missing_in(const Range& range) const {
    std::vector<Range> gaps;
    size_t done = range.offset;
    for (auto at = first_after(range.offset); at != ends_.end() && at->first < range.end(); ++at) {
      if (at->first > done) gaps.push_back({done, at->first - done});
      done = std::max(done, at->second);
    }
    if (done < range.end()) gaps.push_back({done, range.end() - done});
    return gaps;
  }

  std::vector<Range> all() const {
    std::vector<Range> ranges;
    for (const auto& [offset, end] : ends_) ranges.push_back({offset, end - offset});
    return ranges;
  }

  bool operator==(const Ranges& other) const { return ends_ == other.ends_; }
  void clear() { ends_.clear(); }

 private:
  // The first range that ends after `offset`.
  std::map<size_t, size_t>::const_iterator first_after(size_t offset) const {
    auto at = ends_.upper_bound(offset);
    return at != ends_.begin() && std::prev(at)->second > offset ? std::prev(at) : at;
  }

  std::map<size_t, size_t> ends_;  // offset -> end
};

}  // namespace tasuki
