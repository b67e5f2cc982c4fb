#include "../blocks.h"

#include <map>

#include "../status.h"
#include "check.h"

using namespace tasuki;

namespace {

Range take(Blocks& blocks, size_t bytes) {
  Range block{};
  CHECK(blocks.find(bytes, &block));
  blocks.take(block);
  return block;
}

}  // namespace

TEST(small_blocks_are_packed_one_after_another) {
  Blocks blocks(1 << 20);
  CHECK(take(blocks, 100).offset == 0);
  CHECK(take(blocks, 1).offset == 512);
  CHECK(take(blocks, 513).bytes == 1024);
  CHECK(take(blocks, 0).offset == 2048);
  CHECK(blocks.used_bytes() == 2560 && blocks.num_blocks() == 4);
  CHECK(blocks.runs().size() == 1 && blocks.runs()[0].bytes == 2560);
}

TEST(a_freed_block_joins_both_neighbours) {
  Blocks blocks(4096);
  Range freed{};
  for (int i = 0; i < 8; ++i) take(blocks, 512);
  Range none{};
  CHECK(!blocks.find(1, &none));
  for (size_t offset : {1024, 2048, 1536}) CHECK(blocks.release(offset, &freed));
  CHECK(take(blocks, 1536).offset == 1024);
  CHECK(!blocks.find(1, &none));
}

TEST(the_best_fit_leaves_long_ranges_whole) {
  Blocks blocks(1 << 20);
  for (int i = 0; i < 6; ++i) take(blocks, i == 1 ? 4096 : 512);
  Range freed{};
  CHECK(blocks.release(512, &freed) && blocks.release(512 + 4096 + 512, &freed));
  CHECK(take(blocks, 512).offset == 512 + 4096 + 512);
}

TEST(release_of_what_is_no_block_is_refused) {
  Blocks blocks(1 << 20);
  Range block = take(blocks, 2048), freed{};
  CHECK(!blocks.release(512, &freed));
  CHECK(blocks.release(block.offset, &freed));
  CHECK(!blocks.release(block.offset, &freed));
}

TEST(a_range_is_in_use_when_a_block_reaches_into_it) {
  Blocks blocks(1 << 20);
  take(blocks, 512);
  Range freed{};
  Range block = take(blocks, 4096);
  take(blocks, 512);
  CHECK(blocks.release(0, &freed));
  CHECK(!blocks.is_in_use({0, 512}) && blocks.is_in_use({0, 513}));
  CHECK(blocks.is_in_use({1024, 10}) && !blocks.is_in_use({block.end() + 512, 1 << 12}));
}

TEST(random_traffic_never_overlaps_and_ends_empty) {
  Blocks blocks(1 << 20);
  std::map<size_t, size_t> live;
  unsigned random = 7;
  for (int step = 0; step < 20000; ++step) {
    random = random * 1664525u + 1013904223u;
    Range block{};
    if ((random >> 16) % 2 == 0 && blocks.find((random >> 8) % 9000, &block)) {
      auto next = live.lower_bound(block.offset);
      CHECK(next == live.end() || block.end() <= next->first);
      CHECK(next == live.begin() || std::prev(next)->first + std::prev(next)->second <= block.offset);
      blocks.take(block);
      live[block.offset] = block.bytes;
    } else if (!live.empty()) {
      auto victim = std::next(live.begin(), static_cast<long>((random >> 10) % live.size()));
      CHECK(blocks.release(victim->first, &block));
      live.erase(victim);
    }
  }
  Range block{};
  for (const auto& [offset, bytes] : live) CHECK(blocks.release(offset, &block));
  CHECK(blocks.used_bytes() == 0 && take(blocks, 1 << 20).offset == 0);
}
