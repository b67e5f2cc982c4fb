// Transfers that run beside their caller, over a fake driver.
#include "memory_setup.h"

using namespace tasuki;

TEST(an_asynchronous_pause_unmaps_only_after_its_copies) {
  Setup s;
  uint64_t arena = s.arena("optimizer"), ticket = 0, bytes = 0;
  uintptr_t a = s.block(arena, 20 * kPage, 7);
  s.set({arena}, kContent);
  CHECK_OK(s.memory.pause_async({arena}, 42, &ticket));
  bool is_reached = true;
  CHECK_OK(s.memory.poll(ticket, &is_reached));
  CHECK(!is_reached && s.fake->is_mapped(a) && s.usage(arena).state == State::pausing);
  uintptr_t other = 0;
  CHECK(s.memory.allocate(arena, 1, &other).code == Code::paused);
  CHECK_OK(s.memory.wait(ticket, &bytes));
  CHECK(bytes == 32 * kPage && s.fake->used_bytes() == 0 && s.fake->events.empty());
  CHECK(s.memory.wait(ticket, &bytes).code == Code::not_found);
}

TEST(an_asynchronous_resume_has_its_content_after_the_wait) {
  Setup s;
  uint64_t arena = s.arena("optimizer"), ticket = 0, bytes = 0;
  uintptr_t a = s.block(arena, 20 * kPage, 7);
  s.pause({arena}, kContent);
  CHECK_OK(s.memory.resume_async({arena}, &ticket));
  CHECK(s.fake->is_mapped(a) && s.fake->at(a) == 0xEE);
  CHECK_OK(s.memory.stream_after(ticket, 42, 0, 0));
  CHECK_OK(s.memory.wait(ticket, &bytes));
  CHECK(bytes == 32 * kPage && s.holds(a, 20 * kPage, 7));
}

TEST(a_stream_waits_for_the_pieces_that_it_reads) {
  Setup s;
  uint64_t arena = s.arena("weights"), other = s.arena("optimizer"), ticket = 0, bytes = 0;
  uintptr_t first = s.block(arena, kPage, 7), gap = s.block(arena, kPage), second = s.block(arena, kPage, 9);
  uintptr_t late = s.block(other, kPage, 3);
  CHECK_OK(s.memory.release(gap));
  s.pause({arena, other}, kContent);
  CHECK_OK(s.memory.resume_async({arena, other}, &ticket));
  CHECK_OK(s.memory.stream_after(ticket, 42, first, kPage));
  CHECK_OK(s.memory.stream_after(ticket, 42, second, 512));
  CHECK_OK(s.memory.stream_after(ticket, 42, gap, kPage));
  CHECK_OK(s.memory.stream_after(ticket, 42, late, kPage));
  CHECK_OK(s.memory.stream_after(ticket, 42, 0, 0));
  CHECK_OK(s.memory.stream_after(ticket, 42, uintptr_t{1} << 50, 1));  // of no arena: behind everything
  CHECK((s.fake->copies_waited_for == std::vector<size_t>{1, 2, 2, 3, 3, 3}));
  CHECK_OK(s.memory.wait(ticket, &bytes));
  CHECK(s.holds(first, kPage, 7) && s.holds(second, kPage, 9) && s.fake->events.empty());
}

TEST(a_command_during_a_transfer_finishes_it_first) {
  Setup s;
  uint64_t arena = s.arena("optimizer"), ticket = 0, bytes = 0;
  uintptr_t a = s.block(arena, 20 * kPage, 7);
  s.set({arena}, kContent);
  CHECK_OK(s.memory.pause_async({arena}, 0, &ticket));
  CHECK(s.resume({arena}) == 32 * kPage && s.holds(a, 20 * kPage, 7));
  CHECK_OK(s.memory.wait(ticket, &bytes));
  CHECK(bytes == 32 * kPage && s.fake->is_mapped(a));
  s.pause({arena}, kContent);
  CHECK_OK(s.memory.resume_async({arena}, &ticket));
  CHECK(s.pause({arena}, kContent) == 32 * kPage);
  s.resume({arena});
  CHECK(s.holds(a, 20 * kPage, 7));
}

TEST(blocks_freed_during_a_transfer_keep_their_pages_until_it_ends) {
  Setup s;
  uint64_t arena = s.arena("optimizer"), ticket = 0, bytes = 0;
  uintptr_t a = s.block(arena, 16 * kPage, 7);
  s.set({arena}, kContent);
  CHECK_OK(s.memory.pause_async({arena}, 0, &ticket));
  CHECK_OK(s.memory.release(a));
  CHECK_OK(s.memory.wait(ticket, &bytes));
  CHECK(s.fake->used_bytes() == 0 && s.resume({arena}) == 0);
}

TEST(copies_show_their_progress) {
  Setup s;
  uint64_t arena = s.arena("optimizer"), before = copied_bytes();
  s.block(arena, 20 * kPage, 7);
  s.pause({arena}, kContent);
  CHECK(copied_bytes() == before + 20 * kPage);
  s.resume({arena});
  CHECK(copied_bytes() == before + 40 * kPage);
}

TEST(answers_that_nobody_asks_for_do_not_pile_up) {
  Setup s;
  uint64_t arena = s.arena("optimizer"), ticket = 0;
  s.block(arena, kPage);
  for (int i = 0; i < 2000; ++i) {
    CHECK_OK(s.memory.pause_async({arena}, 0, &ticket));
    CHECK_OK(s.memory.resume_async({arena}, &ticket));
  }
  CHECK(s.memory.totals().num_transfers <= 256);
}
