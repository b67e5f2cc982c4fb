#include "sums.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define TASUKI_HAS_AVX2 1
#endif

namespace tasuki {
namespace {

// As in weights/checksum.py.
constexpr uint64_t kStep = 0x9E3779B97F4A7C15u, kMix = 0xBF58476D1CE4E5B9u;
constexpr uint64_t kGroup = 8;
constexpr uint32_t key_at(uint32_t place) {
  uint32_t key = (place + 1) * 0x9E3779B1u;
  key = (key ^ key >> 15) * 0x85EBCA77u;
  return (key ^ key >> 13) | 1u;
}
constexpr uint32_t kKeys[kGroup] = {key_at(0), key_at(1), key_at(2), key_at(3), key_at(4), key_at(5), key_at(6), key_at(7)};
// What a thread processes at a time: copies it, then reads it back from its cache.
constexpr uint64_t kTaskBytes = uint64_t{1} << 20, kPieceBytes = uint64_t{1} << 14;

struct Task {
  size_t block;
  uint64_t first_row, num_rows, first_column, num_columns;
};

#define TASUKI_INLINE inline __attribute__((always_inline))

TASUKI_INLINE uint64_t mixed_at(uint64_t group) {
  uint64_t mixed = group * kStep;
  mixed ^= mixed >> 32;
  return mixed * kMix;
}

TASUKI_INLINE uint64_t term(int64_t pattern, uint64_t mixed, uint64_t place) {
  uint32_t high = static_cast<uint32_t>(mixed >> 32), low = static_cast<uint32_t>(mixed) ^ high;
  int32_t weight = static_cast<int32_t>((low * kKeys[place] + high) | 1u);
  return static_cast<uint64_t>(pattern) * static_cast<uint64_t>(static_cast<int64_t>(weight));
}

template <typename Item>
TASUKI_INLINE uint64_t sum_one(const char* at, uint64_t index) {
  Item value;
  std::memcpy(&value, at, sizeof value);
  return term(value, mixed_at(index / kGroup), index % kGroup);
}

template <typename Item>
TASUKI_INLINE uint64_t sum_row(const char* held, uint64_t columns, uint64_t index) {
  uint64_t total = 0, done = 0;
  for (; done < columns && (index + done) % kGroup != 0; ++done) total += sum_one<Item>(held + done * sizeof(Item), index + done);
  uint64_t lanes[kGroup] = {};
  for (; done + kGroup <= columns; done += kGroup) {
    uint64_t mixed = mixed_at((index + done) / kGroup);
    Item values[kGroup];
    std::memcpy(values, held + done * sizeof(Item), sizeof values);
    for (uint64_t place = 0; place < kGroup; ++place) lanes[place] += term(values[place], mixed, place);
  }
  for (uint64_t lane : lanes) total += lane;
  for (; done < columns; ++done) total += sum_one<Item>(held + done * sizeof(Item), index + done);
  return total;
}

// All three sides step by one element along a row.
template <typename Item>
TASUKI_INLINE uint64_t run_contiguous(const tasuki_block& block, uint64_t row, uint64_t column, uint64_t columns) {
  char* held = static_cast<char*>(block.held) + (static_cast<int64_t>(row) * block.held_row + static_cast<int64_t>(column)) * sizeof(Item);
  const char* source = static_cast<const char*>(block.source);
  if (source != nullptr) source += (static_cast<int64_t>(row) * block.source_row + static_cast<int64_t>(column)) * sizeof(Item);
  uint64_t index = block.index + static_cast<uint64_t>(static_cast<int64_t>(row) * block.index_row) + column, total = 0;
  constexpr uint64_t kPiece = kPieceBytes / sizeof(Item);
  for (uint64_t done = 0; done < columns; done += kPiece) {
    uint64_t length = std::min(kPiece, columns - done);
    if (source != nullptr) std::memcpy(held + done * sizeof(Item), source + done * sizeof(Item), length * sizeof(Item));
    total += sum_row<Item>(held + done * sizeof(Item), length, index + done);
  }
  return total;
}

template <typename Item>
TASUKI_INLINE uint64_t run_strided(const tasuki_block& block, uint64_t row, uint64_t column, uint64_t columns) {
  uint64_t total = 0;
  int64_t r = static_cast<int64_t>(row);
  for (int64_t c = static_cast<int64_t>(column); c < static_cast<int64_t>(column + columns); ++c) {
    char* held = static_cast<char*>(block.held) + (r * block.held_row + c * block.held_column) * static_cast<int64_t>(sizeof(Item));
    if (block.source != nullptr) {
      std::memcpy(held, static_cast<const char*>(block.source) + (r * block.source_row + c * block.source_column) * static_cast<int64_t>(sizeof(Item)),
                  sizeof(Item));
    }
    total += sum_one<Item>(held, block.index + static_cast<uint64_t>(r * block.index_row + c * block.index_column));
  }
  return total;
}

template <typename Item>
TASUKI_INLINE uint64_t run_items(const tasuki_block& block, const Task& task) {
  bool is_contiguous = block.held_column == 1 && block.index_column == 1 && (block.source == nullptr || block.source_column == 1);
  uint64_t total = 0;
  for (uint64_t row = task.first_row; row < task.first_row + task.num_rows; ++row) {
    total += is_contiguous ? run_contiguous<Item>(block, row, task.first_column, task.num_columns)
                           : run_strided<Item>(block, row, task.first_column, task.num_columns);
  }
  return total;
}

TASUKI_INLINE uint64_t run_task(const tasuki_block& block, const Task& task) {
  switch (block.item_bytes) {
    case 1: return run_items<uint8_t>(block, task);
    case 2: return run_items<int16_t>(block, task);
    case 4: return run_items<int32_t>(block, task);
    default: return run_items<int64_t>(block, task);
  }
}

uint64_t run_plain(const tasuki_block& block, const Task& task) { return run_task(block, task); }

#ifdef TASUKI_HAS_AVX2
__attribute__((target("avx2"))) uint64_t run_avx2(const tasuki_block& block, const Task& task) { return run_task(block, task); }
auto chosen() { return __builtin_cpu_supports("avx2") ? run_avx2 : run_plain; }
#else
auto chosen() { return run_plain; }
#endif

void add_tasks(const tasuki_block& block, size_t number, std::vector<Task>* tasks) {
  if (block.rows == 0 || block.columns == 0) return;
  uint64_t row_bytes = block.columns * block.item_bytes;
  if (row_bytes <= kTaskBytes) {
    uint64_t step = std::max<uint64_t>(1, kTaskBytes / row_bytes);
    for (uint64_t row = 0; row < block.rows; row += step) tasks->push_back({number, row, std::min(step, block.rows - row), 0, block.columns});
    return;
  }
  uint64_t step = kTaskBytes / block.item_bytes;
  for (uint64_t row = 0; row < block.rows; ++row) {
    for (uint64_t column = 0; column < block.columns; column += step) {
      tasks->push_back({number, row, 1, column, std::min(step, block.columns - column)});
    }
  }
}

}  // namespace

Status copy_and_sum(const tasuki_block* blocks, size_t num_blocks, uint64_t* sums, size_t num_sums, unsigned num_threads) {
  std::vector<Task> tasks;
  for (size_t i = 0; i < num_blocks; ++i) {
    const tasuki_block& block = blocks[i];
    bool is_item = block.item_bytes == 1 || block.item_bytes == 2 || block.item_bytes == 4 || block.item_bytes == 8;
    if (!is_item) return failure(Code::bad_argument, "item_bytes: neither 1, 2, 4 nor 8");
    if (block.slot >= num_sums) return failure(Code::bad_argument, "slot: beyond the sums");
    add_tasks(block, i, &tasks);
  }
  auto run = chosen();
  size_t wanted = std::max<size_t>(1, std::min<size_t>(num_threads, tasks.size()));
  std::vector<std::vector<uint64_t>> parts(wanted, std::vector<uint64_t>(num_sums, 0));
  std::atomic<size_t> next{0};
  auto work = [&](size_t number) {
    for (size_t i = next++; i < tasks.size(); i = next++) {
      const tasuki_block& block = blocks[tasks[i].block];
      parts[number][block.slot] += run(block, tasks[i]);
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(wanted);
  try {
    while (threads.size() + 1 < wanted) threads.emplace_back(work, threads.size() + 1);
  } catch (const std::system_error&) {
    // As many threads as the system allows.
  }
  work(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<uint64_t>& part : parts) {
    for (size_t slot = 0; slot < num_sums; ++slot) sums[slot] += part[slot];
  }
  return {};
}

}  // namespace tasuki
