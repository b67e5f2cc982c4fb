// Content that does not change is saved once, over a fake driver.
#include "../ranges.h"
#include "memory_setup.h"

using namespace tasuki;

namespace {

struct Frozen : Setup {
  uint64_t id = arena("weights");
  uintptr_t constant = block(id, 16 * kPage, 3), changing = block(id, 16 * kPage, 7);

  Frozen() { freeze(constant, 16 * kPage); }
  void freeze(uintptr_t address, size_t bytes) {
    bool is_ours = false;
    CHECK_OK(memory.freeze(address, bytes, &is_ours));
    CHECK(is_ours);
  }
  void fill(uintptr_t address, size_t bytes, unsigned char value) {
    for (size_t i = 0; i < bytes; ++i) fake->at(address + i) = value;
  }
  // Sleeps and wakes; whether the bytes at `address` came back as they were when it fell asleep.
  bool saves(uintptr_t address) {
    fill(address, 512, ++last_);
    pause({id}, kContent);
    resume({id});
    return fake->at(address) == last_ && fake->at(address + 511) == last_;
  }

 private:
  unsigned char last_ = 100;
};

}  // namespace

TEST(frozen_bytes_are_copied_once_and_come_back_every_time) {
  Frozen s;
  CHECK(s.saves(s.changing));
  s.fake->calls.clear();
  for (int i = 0; i < 3; ++i) {
    CHECK(s.saves(s.changing));
    CHECK(s.holds(s.constant, 16 * kPage, 3));
  }
  // What breaks the promise shows that nothing was read again.
  CHECK(!s.saves(s.constant) && s.holds(s.constant, 16 * kPage, 3));
  CHECK(std::count(s.fake->calls.begin(), s.fake->calls.end(), "copy_to_host") == 4);
}

TEST(bytes_that_are_frozen_after_a_pause_are_copied_by_the_next) {
  Frozen s;
  CHECK(s.saves(s.changing));
  s.freeze(s.changing, 8 * kPage);
  CHECK(s.saves(s.changing) && !s.saves(s.changing) && s.saves(s.changing + 8 * kPage));
}

TEST(a_block_that_takes_the_place_of_a_frozen_one_is_saved) {
  Frozen s;
  CHECK(s.saves(s.changing));
  CHECK_OK(s.memory.release(s.constant));
  CHECK(s.block(s.id, 16 * kPage) == s.constant);
  CHECK(s.saves(s.constant) && s.saves(s.constant));
}

TEST(another_layout_of_blocks_is_saved_in_full_without_what_was_written_to_frozen_ones) {
  Frozen s;
  CHECK(s.saves(s.changing));
  uintptr_t added = s.block(s.id, 16 * kPage, 9);
  CHECK(!s.saves(s.constant) && s.holds(s.constant, 16 * kPage, 3) && s.holds(added, 16 * kPage, 9));
  CHECK(!s.saves(s.constant) && s.holds(s.constant, 16 * kPage, 3));
}

TEST(frozen_bytes_that_were_saved_return_after_writes_without_a_pause) {
  Frozen s;
  s.set({s.id}, kContent);
  CHECK_OK(s.memory.save_frozen(s.id));
  s.fake->calls.clear();
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(s.memory.save_frozen(s.id));
    s.fill(s.constant, 16 * kPage, 50);
    s.fill(s.changing, 16 * kPage, 60);
    CHECK_OK(s.memory.restore_frozen(s.id));
    CHECK(s.holds(s.constant, 16 * kPage, 3) && s.fake->at(s.changing) == 60);
  }
  CHECK(std::count(s.fake->calls.begin(), s.fake->calls.end(), "copy_to_host") == 0);
  s.fill(s.constant, 16 * kPage, 50);
  s.pause({s.id}, kContent);
  CHECK_OK(s.memory.save_frozen(s.id));
  CHECK_OK(s.memory.restore_frozen(s.id));
  s.resume({s.id});
  CHECK(s.holds(s.constant, 16 * kPage, 3) && s.fake->at(s.changing) == 60);
}

TEST(saving_or_restoring_that_failed_can_be_repeated) {
  for (const char* call : {"copy_to_host", "copy_from_host", "synchronize"}) {
    Frozen s;
    s.fake->fail(call, 0);
    bool is_saved = s.memory.save_frozen(s.id).ok();
    s.fake->fail_no_more();
    CHECK(is_saved == (std::string(call) == "copy_from_host"));
    CHECK_OK(s.memory.save_frozen(s.id));
    s.fill(s.constant, 16 * kPage, 50);
    s.fake->fail(call, 0);
    bool is_restored = s.memory.restore_frozen(s.id).ok();
    s.fake->fail_no_more();
    CHECK(is_restored == (std::string(call) == "copy_to_host"));
    CHECK_OK(s.memory.restore_frozen(s.id));
    CHECK(s.holds(s.constant, 16 * kPage, 3) && s.holds(s.changing, 16 * kPage, 7));
  }
}

TEST(a_pause_that_failed_keeps_what_was_saved_of_frozen_bytes) {
  for (const char* call : {"copy_to_host", "synchronize", "unmap"}) {
    Frozen s;
    CHECK(s.saves(s.changing));
    uint64_t bytes = 0;
    s.fill(s.constant, 16 * kPage, 50);
    s.fake->fail(call, 0);
    CHECK(!s.memory.pause({s.id}, &bytes).ok());
    s.fake->fail_no_more();
    CHECK(!s.saves(s.constant) && s.holds(s.constant, 16 * kPage, 3));
    CHECK(s.saves(s.changing));
  }
}

TEST(an_address_in_no_arena_is_left_alone) {
  Frozen s;
  bool is_ours = true;
  CHECK_OK(s.memory.freeze(16, 8, &is_ours));
  CHECK(!is_ours);
  CHECK(s.memory.freeze(s.constant, size_t{1} << 40, &is_ours).code == Code::bad_argument);
}

TEST(ranges_join_split_and_tell_what_is_missing) {
  Ranges ranges;
  auto gaps = [&](size_t offset, size_t end) {
    std::string text;
    for (const Range& gap : ranges.missing_in({offset, end - offset})) text += std::to_string(gap.offset) + "-" + std::to_string(gap.end()) + " ";
    return text;
  };
  CHECK(gaps(0, 10) == "0-10 ");
  ranges.add({2, 2});
  ranges.add({6, 2});
  CHECK(gaps(0, 10) == "0-2 4-6 8-10 " && gaps(3, 7) == "4-6 " && gaps(2, 4).empty());
  ranges.add({4, 2});
  CHECK(gaps(0, 10) == "0-2 8-10 ");
  ranges.remove({3, 2});
  CHECK(gaps(0, 10) == "0-2 3-5 8-10 ");
  ranges.remove({0, 100});
  CHECK(gaps(0, 10) == "0-10 ");
}

TEST(host_memory_is_taken_in_steps_before_the_first_pause) {
  Setup s;
  uint64_t arena = s.arena("optimizer", size_t{1} << 20);
  uintptr_t a = s.block(arena, size_t{40} << 20, 5);
  s.set({arena}, kContent);
  size_t missing = 1;
  int steps = 0;
  CHECK_OK(s.memory.reserve_host(arena, size_t{8} << 20, size_t{16} << 20, &missing));
  CHECK(missing == size_t{24} << 20);
  for (steps = 1; missing != 0; ++steps) CHECK_OK(s.memory.reserve_host(arena, 0, size_t{16} << 20, &missing));
  CHECK(steps == 3 && s.usage(arena).host_copy_bytes >= size_t{40} << 20);
  size_t pins = s.fake->pinned.size();
  s.pause({arena}, kContent);
  CHECK(s.fake->pinned.size() == pins);
  CHECK_OK(s.memory.reserve_host(arena, 0, 1, &missing));
  s.resume({arena});
  CHECK(missing == 0 && s.holds(a, size_t{40} << 20, 5));
  // For what is still to be made.
  CHECK_OK(s.memory.reserve_host(arena, size_t{48} << 20, size_t{1} << 30, &missing));
  CHECK(missing == 0 && s.usage(arena).host_copy_bytes >= size_t{48} << 20);
}

TEST(a_host_without_memory_to_pin_says_so_with_numbers) {
  Setup s;
  uint64_t arena = s.arena("optimizer");
  s.block(arena, kPage);
  size_t missing = 0;
  CHECK_OK(s.memory.reserve_host(arena, 0, kPage, &missing));
  CHECK(missing == 0 && s.fake->pinned.empty());  // nothing is kept of it
  s.set({arena}, kContent);
  s.fake->fail("pin", 0, 1, Code::out_of_memory);
  Status status = s.memory.reserve_host(arena, 0, kPage, &missing);
  CHECK(status.code == Code::out_of_memory && has(status.message, "pinned host memory") && status.needed_bytes >= kPage);
  uint64_t bytes = 0;
  s.fake->fail("pin", 0, 1, Code::out_of_memory);
  CHECK(s.memory.pause({arena}, &bytes).code == Code::out_of_memory && s.usage(arena).state == State::resident);
}
