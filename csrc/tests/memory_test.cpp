// Pause and resume over a fake driver: what must hold when everything works, or when room is lacking.
#include "memory_setup.h"

using namespace tasuki;

TEST(a_pause_gives_every_page_back_and_a_resume_maps_the_same_addresses) {
  Setup s;
  uint64_t arena = s.arena("weights");
  uintptr_t a = s.block(arena, 40 * kPage, 1);
  CHECK(s.usage(arena).total_bytes == 48 * kPage && s.fake->used_bytes() == 48 * kPage);
  CHECK(s.pause({arena}) == 48 * kPage && s.fake->used_bytes() == 0 && !s.fake->is_mapped(a));
  CHECK(s.usage(arena).state == State::paused && s.usage(arena).total_bytes == 48 * kPage);
  CHECK(s.resume({arena}) == 48 * kPage && s.fake->is_mapped(a + 40 * kPage - 1));
}

TEST(pause_and_resume_are_idempotent) {
  Setup s;
  uint64_t arena = s.arena("weights");
  s.block(arena, kPage);
  CHECK(s.resume({arena}) == 0);
  CHECK(s.pause({arena, arena}) == 16 * kPage && s.pause({arena}) == 0);
  CHECK(s.resume({arena, arena}) == 16 * kPage && s.resume({arena}) == 0);
  CHECK(s.pause({}) == 0);
}

TEST(unknown_arenas_are_refused_and_nothing_else_is_touched) {
  Setup s;
  uint64_t arena = s.arena("weights"), bytes = 0;
  s.block(arena, kPage);
  std::string before = s.pages();
  CHECK(s.memory.pause({arena, 999}, &bytes).code == Code::not_found);
  CHECK(s.memory.resume({999}, &bytes).code == Code::not_found);
  CHECK(s.pages() == before);
}

TEST(small_blocks_share_chunks) {
  Setup s;
  uint64_t arena = s.arena("weights");
  for (int i = 0; i < 100; ++i) s.block(arena, 600);
  CHECK(s.usage(arena).num_chunks == 2 && s.usage(arena).num_blocks == 100);
}

TEST(a_chunk_without_blocks_is_given_back_and_comes_back_when_needed) {
  Setup s;
  uint64_t arena = s.arena("weights");
  uintptr_t a = s.block(arena, 16 * kPage), b = s.block(arena, 16 * kPage), c = s.block(arena, 16 * kPage);
  CHECK_OK(s.memory.release(b));
  CHECK(s.fake->used_bytes() == 32 * kPage && s.fake->is_mapped(a) && !s.fake->is_mapped(b) && s.fake->is_mapped(c));
  CHECK(s.block(arena, 8 * kPage) == b && s.fake->is_mapped(b));
}

TEST(blocks_freed_while_asleep_are_not_mapped_again) {
  Setup s;
  uint64_t arena = s.arena("weights");
  uintptr_t a = s.block(arena, 16 * kPage), b = s.block(arena, 16 * kPage, 3);
  s.pause({arena}, kContent);
  CHECK_OK(s.memory.release(a));
  CHECK(s.resume({arena}) == 16 * kPage && !s.fake->is_mapped(a) && s.holds(b, 16 * kPage, 3));
}

TEST(allocating_in_a_sleeping_arena_is_refused) {
  Setup s;
  uint64_t arena = s.arena("kv_cache");
  s.block(arena, kPage);
  s.pause({arena});
  uintptr_t address = 0;
  Status status = s.memory.allocate(arena, kPage, &address);
  CHECK(status.code == Code::paused && has(status.message, "kv_cache"));
}

TEST(freeing_a_foreign_address_is_refused) {
  Setup s;
  uint64_t arena = s.arena("weights");
  uintptr_t a = s.block(arena, kPage);
  int other = 0;
  CHECK(s.memory.release(reinterpret_cast<uintptr_t>(&other)).code == Code::not_found);
  CHECK(s.memory.release(a + 512).code == Code::not_found);
  CHECK_OK(s.memory.release(a));
  CHECK(s.memory.release(a).code == Code::not_found);
}

TEST(kept_content_comes_back_and_the_host_copy_is_taken_once) {
  Setup s;
  uint64_t arena = s.arena("optimizer");
  uintptr_t a = s.block(arena, 20 * kPage, 1), b = s.block(arena, 3000, 9);
  s.pause({arena}, kContent);
  uint64_t pinned = s.usage(arena).host_copy_bytes;
  CHECK(s.fake->used_bytes() == 0 && pinned > 0);
  s.resume({arena});
  CHECK(s.holds(a, 20 * kPage, 1) && s.holds(b, 3000, 9));
  for (int i = 0; i < 5; ++i) s.pause({arena}, kContent), s.resume({arena});
  CHECK(s.usage(arena).host_copy_bytes == pinned && s.fake->pinned.size() == 1);
}

TEST(discarded_content_is_not_restored_from_an_older_copy) {
  Setup s;
  uint64_t arena = s.arena("optimizer");
  uintptr_t a = s.block(arena, kPage, 1);
  s.pause({arena}, kContent), s.resume({arena});
  s.pause({arena}, kDrop), s.resume({arena});
  CHECK(s.fake->at(a) == 0xEE);
}

TEST(kept_chunks_stay_ours_and_a_resume_creates_nothing) {
  Setup s;
  uint64_t arena = s.arena("kv_cache");
  uintptr_t a = s.block(arena, 32 * kPage, 5);
  CHECK(s.pause({arena}, kChunks) == 0);
  CHECK(s.usage(arena).kept_bytes == 32 * kPage && s.usage(arena).mapped_bytes == 0 && !s.fake->is_mapped(a));
  s.fake->calls.clear();
  CHECK(s.resume({arena}) == 32 * kPage && s.holds(a, 32 * kPage, 5));
  CHECK(std::count(s.fake->calls.begin(), s.fake->calls.end(), "create") == 0);
}

TEST(a_second_pause_without_keep_gives_kept_chunks_back) {
  Setup s;
  uint64_t arena = s.arena("kv_cache");
  s.block(arena, 32 * kPage);
  s.pause({arena}, kBoth);
  CHECK(s.pause({arena}, kDrop) == 32 * kPage && s.fake->used_bytes() == 0);
}

TEST(the_device_is_synchronized_before_the_first_unmap) {
  Setup s;
  uint64_t arena = s.arena("weights");
  s.block(arena, kPage);
  s.fake->calls.clear();
  s.pause({arena});
  auto sync = std::find(s.fake->calls.begin(), s.fake->calls.end(), "synchronize");
  auto unmap = std::find(s.fake->calls.begin(), s.fake->calls.end(), "unmap");
  CHECK(sync < unmap && unmap != s.fake->calls.end());
}

TEST(neighbouring_chunks_are_allowed_and_unmapped_in_one_call) {
  Setup s;
  uint64_t arena = s.arena("weights");
  s.block(arena, 160 * kPage);
  s.fake->calls.clear();
  s.pause({arena}), s.resume({arena});
  CHECK(std::count(s.fake->calls.begin(), s.fake->calls.end(), "unmap") == 1);
  CHECK(std::count(s.fake->calls.begin(), s.fake->calls.end(), "allow") == 1);
  CHECK(std::count(s.fake->calls.begin(), s.fake->calls.end(), "map") == 10);
}

TEST(a_resume_without_room_changes_nothing_and_says_needed_and_free) {
  Setup s;
  uint64_t weights = s.arena("weights"), kv = s.arena("kv_cache"), other = s.arena("gradients"), bytes = 0;
  s.block(weights, 64 * kPage), s.block(kv, 128 * kPage);
  s.pause({weights, kv});
  s.fake->total_bytes = 160 * kPage;
  s.block(other, 48 * kPage);
  std::string before = s.pages();
  Status status = s.memory.resume({weights, kv}, &bytes);
  CHECK(status.code == Code::out_of_memory && s.pages() == before && bytes == 0);
  CHECK(status.needed_bytes == 192 * kPage && status.free_bytes == 112 * kPage);
  CHECK(has(status.message, "weights, kv_cache") && has(status.message, "free"));
  CHECK(s.resume({weights}) == 64 * kPage);
}

TEST(an_allocation_without_room_leaves_the_arena_as_it_was) {
  Setup s;
  uint64_t arena = s.arena("weights");
  s.block(arena, 10 * kPage);
  s.fake->total_bytes = 40 * kPage;
  std::string before = s.pages();
  uintptr_t address = 0;
  Status status = s.memory.allocate(arena, 60 * kPage, &address);
  CHECK(status.code == Code::out_of_memory && status.free_bytes == 24 * kPage && s.pages() == before);
  CHECK_OK(s.memory.allocate(arena, 16 * kPage, &address));
}

TEST(growing_ahead_is_given_up_when_only_the_exact_bytes_fit) {
  Setup s;
  uint64_t arena = 0;
  CHECK_OK(s.memory.create_arena(DriverKind::cuda, "kv_cache", 0, {size_t{64} << 20, kPage, 1024 * kPage}, &arena));
  s.block(arena, 800 * kPage);
  s.fake->total_bytes = 810 * kPage;
  s.block(arena, 2 * kPage);
  CHECK(s.fake->used_bytes() == 802 * kPage);
}

TEST(three_hundred_cycles_end_where_they_began) {
  Setup s;
  uint64_t weights = s.arena("weights"), optimizer = s.arena("optimizer");
  uintptr_t a = s.block(weights, 40 * kPage, 1), b = s.block(optimizer, 70 * kPage, 2);
  s.pause({weights, optimizer}, kContent), s.resume({weights, optimizer});
  std::string before = s.pages();
  size_t num_pinned = s.fake->pinned.size();
  for (int i = 0; i < 300; ++i) {
    s.pause({weights, optimizer}, i % 3 == 0 ? kBoth : kContent);
    s.resume({weights, optimizer});
  }
  CHECK(s.pages() == before && s.holds(a, 40 * kPage, 1) && s.holds(b, 70 * kPage, 2));
  CHECK(s.fake->pinned.size() == num_pinned && s.fake->events.empty() && s.fake->reservations.size() == 2);
}

TEST(an_arena_in_use_cannot_be_destroyed_and_an_empty_one_leaves_nothing) {
  Setup s;
  uint64_t arena = s.arena("weights");
  uintptr_t a = s.block(arena, kPage);
  CHECK(s.memory.destroy_arena(arena).code == Code::busy);
  s.pause({arena}, kBoth);
  CHECK_OK(s.memory.release(a));
  CHECK_OK(s.memory.destroy_arena(arena));
  CHECK(s.fake->reservations.empty() && s.fake->chunks.empty() && s.fake->mappings.empty() && s.fake->pinned.empty());
}

TEST(a_driver_that_is_not_open_is_named) {
  Setup s;
  uint64_t arena = 0;
  CHECK(s.memory.create_arena(DriverKind::host, "weights", 0, {}, &arena).code == Code::unavailable);
}
