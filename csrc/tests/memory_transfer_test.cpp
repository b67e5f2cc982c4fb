// Transfers that run beside their caller, over a fake driver.
#include "memory_setup.h"

using namespace tasuki;

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
  s.pause({arena}, kContent);
  CHECK_OK(s.memory.resume_async({arena}, &ticket));
  CHECK(s.pause({arena}, kContent) == 32 * kPage);
  CHECK_OK(s.memory.wait(ticket, &bytes));
  CHECK(bytes == 32 * kPage && !s.fake->is_mapped(a));
  s.resume({arena});
  CHECK(s.holds(a, 20 * kPage, 7));
}

TEST(a_block_freed_during_a_transfer_keeps_its_pages_until_it_ends) {
  Setup s;
  uint64_t arena = s.arena("optimizer"), ticket = 0, bytes = 0;
  uintptr_t a = s.block(arena, 16 * kPage, 7);
  s.pause({arena}, kContent);
  CHECK_OK(s.memory.resume_async({arena}, &ticket));
  CHECK_OK(s.memory.release(a));
  CHECK(s.fake->is_mapped(a));
  CHECK_OK(s.memory.wait(ticket, &bytes));
  s.pause({arena});
  CHECK(s.fake->used_bytes() == 0 && s.resume({arena}) == 0);
}

TEST(answers_that_nobody_asks_for_do_not_pile_up) {
  Setup s;
  uint64_t arena = s.arena("optimizer"), ticket = 0;
  s.block(arena, kPage);
  for (int i = 0; i < 2000; ++i) {
    s.pause({arena});
    CHECK_OK(s.memory.resume_async({arena}, &ticket));
  }
  CHECK(s.memory.totals().num_transfers <= 256);
}
