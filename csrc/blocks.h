// Byte ranges of an arena in use: best fit, neighbours merged on release. Arithmetic only.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "ranges.h"

namespace tasuki {

class Blocks {
 public:
  static constexpr size_t kAlignment = 512;  // required by torch of a CUDA segment

  explicit Blocks(size_t capacity);

  // Where `bytes` (rounded up to kAlignment) would go; false if no free range is large enough.
  bool find(size_t bytes, Range* block) const;
  void take(const Range& block);
  // False if no block starts at `offset`.
  bool release(size_t offset, Range* block);

  bool is_in_use(const Range& range) const;
  // Blocks in use, neighbours merged.
  std::vector<Range> runs() const;
  size_t used_bytes() const { return used_bytes_; }
  size_t num_blocks() const { return used_.size(); }

 private:
  void add_free(Range range);
  void remove_free(const Range& range);

  std::map<size_t, size_t> used_;             // offset -> bytes
  std::map<size_t, size_t> free_;             // offset -> bytes
  std::set<std::pair<size_t, size_t>> fits_;  // (bytes, offset) of every free range
  size_t used_bytes_ = 0;
};

}  // namespace tasuki
