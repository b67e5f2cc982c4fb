#include "blocks.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace tasuki {

Blocks::Blocks(size_t capacity) { add_free({0, capacity}); }

bool Blocks::find(size_t bytes, Range* block) const {
  if (bytes > SIZE_MAX - kAlignment) return false;
  size_t rounded = bytes == 0 ? kAlignment : (bytes + kAlignment - 1) / kAlignment * kAlignment;
  auto fit = fits_.lower_bound({rounded, 0});
  if (fit == fits_.end()) return false;
  *block = {fit->second, rounded};
  return true;
}

void Blocks::take(const Range& block) {
  auto found = std::prev(free_.upper_bound(block.offset));
  Range whole{found->first, found->second};
  remove_free(whole);
  if (whole.offset < block.offset) add_free({whole.offset, block.offset - whole.offset});
  if (block.end() < whole.end()) add_free({block.end(), whole.end() - block.end()});
  used_[block.offset] = block.bytes;
  used_bytes_ += block.bytes;
}

bool Blocks::release(size_t offset, Range* block) {
  auto found = used_.find(offset);
  if (found == used_.end()) return false;
  *block = {offset, found->second};
  used_.erase(found);
  used_bytes_ -= block->bytes;
  Range joined = *block;
  auto next = free_.find(joined.end());
  if (next != free_.end()) {
    Range range{next->first, next->second};
    remove_free(range);
    joined.bytes += range.bytes;
  }
  auto after = free_.lower_bound(joined.offset);
  if (after != free_.begin()) {
    Range range{std::prev(after)->first, std::prev(after)->second};
    if (range.end() == joined.offset) {
      remove_free(range);
      joined = {range.offset, range.bytes + joined.bytes};
    }
  }
  add_free(joined);
  return true;
}

bool Blocks::is_in_use(const Range& range) const {
  auto next = used_.lower_bound(range.offset);
  if (next != used_.end() && next->first < range.end()) return true;
  return next != used_.begin() && std::prev(next)->first + std::prev(next)->second > range.offset;
}

std::vector<Range> Blocks::runs() const {
  std::vector<Range> runs;
  for (const auto& [offset, bytes] : used_) {
    if (!runs.empty() && runs.back().end() == offset) {
      runs.back().bytes += bytes;
    } else {
      runs.push_back({offset, bytes});
    }
  }
  return runs;
}

void Blocks::add_free(Range range) {
  free_[range.offset] = range.bytes;
  fits_.insert({range.bytes, range.offset});
}

void Blocks::remove_free(const Range& range) {
  free_.erase(range.offset);
  fits_.erase({range.bytes, range.offset});
}

}  // namespace tasuki
