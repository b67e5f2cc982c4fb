// Copies and checksums of host memory; tests/unit/test_host_sums.py compares the sums with Python's.
#include "../sums.h"

#include <cstring>

#include "check.h"

using namespace tasuki;

namespace {

tasuki_block row(const void* source, void* held, uint64_t columns, uint32_t item_bytes) {
  tasuki_block block{};
  block.source = source, block.held = held;
  block.rows = 1, block.columns = columns;
  block.source_column = block.held_column = block.index_column = 1;
  block.item_bytes = item_bytes;
  return block;
}

uint64_t sum_of(const std::vector<tasuki_block>& blocks, unsigned num_threads) {
  uint64_t sums[1] = {0};
  CHECK_OK(copy_and_sum(blocks.data(), blocks.size(), sums, 1, num_threads));
  return sums[0];
}

std::vector<int32_t> numbers(size_t count) {
  std::vector<int32_t> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<int32_t>(i * 2654435761u);
  return values;
}

}  // namespace

TEST(threads_and_cuts_do_not_change_a_sum) {
  std::vector<int32_t> values = numbers(1000003);
  uint64_t whole = sum_of({row(nullptr, values.data(), values.size(), 4)}, 1);
  CHECK(whole == sum_of({row(nullptr, values.data(), values.size(), 4)}, 4));
  tasuki_block first = row(nullptr, values.data(), 333333, 4), rest = row(nullptr, values.data() + 333333, values.size() - 333333, 4);
  rest.index = 333333;
  CHECK(whole == sum_of({first, rest}, 3));
}

TEST(strided_elements_sum_to_what_they_do_in_a_row) {
  std::vector<int32_t> values = numbers(4096), apart(8192, 1), copied(4096, 0);
  for (size_t i = 0; i < values.size(); ++i) apart[2 * i] = values[i];
  tasuki_block block = row(apart.data(), copied.data(), values.size(), 4);
  block.source_column = 2;
  CHECK(sum_of({block}, 2) == sum_of({row(nullptr, values.data(), values.size(), 4)}, 1));
  CHECK(copied == values);
}

TEST(one_changed_or_swapped_element_changes_the_sum) {
  std::vector<int32_t> values = numbers(5000);
  uint64_t before = sum_of({row(nullptr, values.data(), values.size(), 4)}, 1);
  values[4321] ^= 1;
  CHECK(sum_of({row(nullptr, values.data(), values.size(), 4)}, 1) != before);
  values[4321] ^= 1;
  std::swap(values[7], values[4000]);
  CHECK(sum_of({row(nullptr, values.data(), values.size(), 4)}, 1) != before);
}

TEST(bad_blocks_are_refused_before_anything_is_written) {
  std::vector<int32_t> values = numbers(8), held(8, 5);
  tasuki_block good = row(values.data(), held.data(), 8, 4), bad = good;
  uint64_t sums[1] = {0};
  bad.item_bytes = 3;
  tasuki_block blocks[2] = {good, bad};
  CHECK(copy_and_sum(blocks, 2, sums, 1, 1).code == Code::bad_argument);
  blocks[1] = good, blocks[1].slot = 1;
  CHECK(copy_and_sum(blocks, 2, sums, 1, 1).code == Code::bad_argument);
  CHECK(held == std::vector<int32_t>(8, 5) && sums[0] == 0);
  CHECK_OK(copy_and_sum(nullptr, 0, nullptr, 0, 1));
}
