// Pause and resume over a fake driver: what must hold when everything works, and when any single call fails.
#include "../memory.h"

#include "check.h"
#include "fake_driver.h"

using namespace tasuki;

namespace {

constexpr PausePolicy kDrop{false, false}, kContent{true, false}, kChunks{false, true}, kBoth{true, true};

struct Setup {
  Memory memory;
  FakeDriver* fake;
  Setup() {
    auto driver = std::make_unique<FakeDriver>();
    fake = driver.get();
    CHECK_OK(memory.set_driver(DriverKind::cuda, std::move(driver)));
  }
  uint64_t arena(const char* tag, size_t chunk_bytes = 16 * kPage) {
    uint64_t id = 0;
    CHECK_OK(memory.create_arena(DriverKind::cuda, tag, 0, {size_t{64} << 20, chunk_bytes, chunk_bytes}, &id));
    return id;
  }
  uintptr_t block(uint64_t arena, size_t bytes, unsigned char first = 0) {
    uintptr_t address = 0;
    CHECK_OK(memory.allocate(arena, bytes, &address));
    for (size_t i = 0; first != 0 && i < bytes; i += 512) fake->at(address + i) = static_cast<unsigned char>(first + i / 512);
    return address;
  }
  bool holds(uintptr_t address, size_t bytes, unsigned char first) {
    for (size_t i = 0; i < bytes; i += 512) {
      if (fake->at(address + i) != static_cast<unsigned char>(first + i / 512)) return false;
    }
    return true;
  }
  void set(const Memory::Ids& arenas, PausePolicy policy) {
    for (uint64_t arena : arenas) CHECK_OK(memory.set_policy(arena, policy));
  }
  uint64_t pause(const Memory::Ids& arenas, PausePolicy policy = kDrop) {
    uint64_t bytes = 0;
    set(arenas, policy);
    CHECK_OK(memory.pause(arenas, &bytes));
    return bytes;
  }
  uint64_t resume(const Memory::Ids& arenas) {
    uint64_t bytes = 0;
    CHECK_OK(memory.resume(arenas, &bytes));
    return bytes;
  }
  Usage usage(uint64_t arena) {
    Usage usage{};
    CHECK_OK(memory.usage(arena, &usage));
    return usage;
  }
  std::string pages() const {  // everything that an undo must bring back
    std::string text;
    for (const auto& [start, mapping] : fake->mappings) {
      text += std::to_string(start) + "+" + std::to_string(mapping.bytes) + (mapping.is_allowed ? "a " : "- ");
    }
    return text + "used " + std::to_string(fake->used_bytes());
  }
};

}  // namespace

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

TEST(dropped_content_is_not_restored_from_an_older_copy) {
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

// Every call of every step is made to fail once: pages are as before, and the same request succeeds afterwards.
template <typename Attempt>
void fail_each_call(const char* call, bool is_pause, PausePolicy policy, Attempt attempt) {
  for (int after = 0; after < 40; ++after) {
    Setup s;
    uint64_t weights = s.arena("weights"), kv = s.arena("kv_cache");
    uintptr_t a = s.block(weights, 40 * kPage, 1), b = s.block(kv, 56 * kPage, 2);
    s.block(weights, 20 * kPage, 3);
    CHECK_OK(s.memory.release(a + 40 * kPage));  // a hole, so that there are several runs
    if (!is_pause) s.pause({weights, kv}, policy);
    std::string before = s.pages();
    s.fake->fail(call, after);
    Status status = attempt(s, Memory::Ids{weights, kv});
    if (s.fake->is_failure_pending(call) && status.ok()) return;  // there is no such call any more
    bool is_only_kept = is_pause && std::string(call) == "release";
    CHECK(!status.ok() && has(status.message, call));
    if (!is_only_kept) {
      CHECK(s.pages() == before);
      CHECK(s.usage(weights).state == (is_pause ? State::resident : State::paused));
      if (is_pause) CHECK(s.holds(a, 40 * kPage, 1) && s.holds(b, 56 * kPage, 2));
    }
    s.fake->fail_no_more();
    CHECK_OK(attempt(s, Memory::Ids{weights, kv}));
    if (is_pause) s.resume({weights, kv});
    CHECK(s.fake->is_mapped(a) && s.fake->is_mapped(b));
    if (policy.keep_content) CHECK(s.holds(a, 40 * kPage, 1) && s.holds(b, 56 * kPage, 2));
  }
  CHECK(false);  // more calls than expected
}

TEST(a_pause_that_fails_at_any_call_is_undone) {
  for (PausePolicy policy : {kDrop, kContent, kChunks, kBoth}) {
    for (const char* call : {"synchronize", "unmap", "release", "pin", "copy_to_host", "mark", "wait"}) {
      fail_each_call(call, true, policy, [policy](Setup& s, const Memory::Ids& ids) {
        uint64_t bytes = 0;
        s.set(ids, policy);
        return s.memory.pause(ids, &bytes);
      });
    }
  }
}

TEST(tags_with_different_policies_move_together) {
  Setup s;
  uint64_t weights = s.arena("weights"), optimizer = s.arena("optimizer"), kv = s.arena("kv_cache"), bytes = 0;
  uintptr_t a = s.block(weights, 16 * kPage, 1), b = s.block(optimizer, 16 * kPage, 2), c = s.block(kv, 16 * kPage, 3);
  s.set({optimizer}, kContent), s.set({kv}, kChunks);
  std::string before = s.pages();
  s.fake->fail("unmap", 2);
  CHECK(!s.memory.pause({weights, optimizer, kv}, &bytes).ok() && s.pages() == before);
  CHECK_OK(s.memory.pause({weights, optimizer, kv}, &bytes));
  CHECK(bytes == 32 * kPage && s.fake->used_bytes() == 16 * kPage);
  CHECK(s.resume({weights, optimizer, kv}) == 48 * kPage);
  CHECK(s.fake->at(a) == 0xEE && s.holds(b, 16 * kPage, 2) && s.holds(c, 16 * kPage, 3));
}

TEST(a_resume_that_fails_at_any_call_is_undone) {
  for (PausePolicy policy : {kDrop, kContent, kChunks, kBoth}) {
    for (const char* call : {"create", "map", "allow", "copy_from_host", "mark", "wait"}) {
      fail_each_call(call, false, policy, [](Setup& s, const Memory::Ids& ids) {
        uint64_t bytes = 0;
        return s.memory.resume(ids, &bytes);
      });
    }
  }
}

TEST(chunks_that_could_not_be_released_go_with_the_next_pause) {
  Setup s;
  uint64_t arena = s.arena("weights"), bytes = 0;
  s.block(arena, 48 * kPage);
  s.fake->fail("release", 1);
  Status status = s.memory.pause({arena}, &bytes);
  CHECK(status.code == Code::driver && has(status.message, "weights sleeps, but"));
  CHECK(s.usage(arena).state == State::paused && s.usage(arena).kept_bytes == 16 * kPage && bytes == 32 * kPage);
  CHECK(s.pause({arena}) == 16 * kPage && s.fake->used_bytes() == 0);
}

TEST(a_failed_undo_poisons_the_arena_and_no_other) {
  Setup s;
  uint64_t weights = s.arena("weights"), kv = s.arena("kv_cache"), bytes = 0;
  s.block(weights, 16 * kPage);
  uintptr_t hole = s.block(weights, 16 * kPage);
  s.block(weights, 16 * kPage), s.block(kv, 16 * kPage);
  CHECK_OK(s.memory.release(hole));
  s.fake->fail("unmap", 1);  // the second run of weights
  s.fake->fail("map", 0);    // mapping the first run again
  CHECK(!s.memory.pause({weights}, &bytes).ok());
  s.fake->fail_no_more();
  Status status = s.memory.resume({weights}, &bytes);
  CHECK(status.code == Code::poisoned && has(status.message, "weights"));
  CHECK(s.pause({kv}) == 16 * kPage && s.resume({kv}) == 16 * kPage);
}

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
  CHECK_OK(s.memory.stream_after(ticket, 42));
  CHECK_OK(s.memory.wait(ticket, &bytes));
  CHECK(bytes == 32 * kPage && s.holds(a, 20 * kPage, 7));
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

TEST(chunks_that_a_peer_may_hold_are_not_counted_as_given_back) {
  Setup s;
  uint64_t arena = s.arena("weights"), id = 0;
  s.block(arena, 32 * kPage);
  std::vector<SharedChunk> chunks;
  uintptr_t base = 0;
  CHECK_OK(s.memory.export_arena(arena, Access::read_only, 99, &chunks, &base, &id));
  CHECK(chunks.size() == 2 && chunks[1].offset == 16 * kPage && s.usage(arena).exported_bytes == 32 * kPage);
  CHECK(s.pause({arena}) == 0);
  CHECK(s.usage(arena).held_bytes == 32 * kPage && s.usage(arena).exported_bytes == 0);
  CHECK_OK(s.memory.close_export(id));
  CHECK(s.usage(arena).held_bytes == 0 && s.memory.close_export(id).code == Code::not_found);
}

TEST(an_import_maps_the_peers_chunks_and_sleeps_and_wakes) {
  Setup s;
  uint64_t arena = s.arena("weights"), id = 0, import = 0;
  uintptr_t a = s.block(arena, 32 * kPage, 3), base = 0, there = 0;
  std::vector<SharedChunk> chunks;
  CHECK_OK(s.memory.export_arena(arena, Access::read_write, 99, &chunks, &base, &id));
  CHECK_OK(s.memory.open_import(DriverKind::cuda, 0, Access::read_only, chunks, &import, &there));
  CHECK(s.holds(there + (a - base), 32 * kPage, 3) && s.memory.totals().imported_bytes == 32 * kPage);
  CHECK_OK(s.memory.unmap_import(import));
  CHECK(!s.fake->is_mapped(there));
  CHECK_OK(s.memory.unmap_import(import));
  CHECK_OK(s.memory.map_import(import));
  CHECK(s.holds(there + (a - base), 32 * kPage, 3));
  CHECK_OK(s.memory.close_import(import));
  CHECK(s.memory.totals().imported_bytes == 0 && s.fake->reservations.size() == 1);
}

TEST(an_import_that_fails_at_any_call_leaves_nothing) {
  for (const char* call : {"import_fd", "reserve", "map", "allow"}) {
    for (int after = 0; after < 2; ++after) {
      if (after > 0 && std::string(call) == "reserve") continue;
      Setup s;
      uint64_t arena = s.arena("weights"), id = 0, import = 0;
      s.block(arena, 32 * kPage);
      std::vector<SharedChunk> chunks;
      uintptr_t base = 0;
      CHECK_OK(s.memory.export_arena(arena, Access::read_write, 99, &chunks, &base, &id));
      size_t num_mappings = s.fake->mappings.size(), num_reservations = s.fake->reservations.size();
      s.fake->fail(call, after);
      CHECK(!s.memory.open_import(DriverKind::cuda, 0, Access::read_only, chunks, &import, &base).ok());
      CHECK(s.fake->mappings.size() == num_mappings && s.fake->reservations.size() == num_reservations);
      for (const auto& [physical, chunk] : s.fake->chunks) CHECK(chunk.num_references == 1);
    }
  }
}

TEST(a_dropped_import_holds_nothing_and_gets_other_chunks_at_the_same_addresses) {
  Setup s;
  uint64_t arena = s.arena("weights"), id = 0, import = 0;
  uintptr_t a = s.block(arena, 32 * kPage, 3), base = 0, there = 0;
  std::vector<SharedChunk> chunks;
  CHECK_OK(s.memory.export_arena(arena, Access::read_write, 99, &chunks, &base, &id));
  CHECK_OK(s.memory.open_import(DriverKind::cuda, 0, Access::read_only, chunks, &import, &there));
  CHECK(s.memory.renew_import(import, chunks).code == Code::bad_argument);
  CHECK_OK(s.memory.drop_import(import));
  CHECK_OK(s.memory.drop_import(import));
  CHECK(!s.fake->is_mapped(there) && s.memory.totals().imported_bytes == 0);
  CHECK(s.memory.map_import(import).code == Code::bad_argument);
  for (const auto& [physical, chunk] : s.fake->chunks) CHECK(chunk.num_references == 1);
  CHECK_OK(s.memory.close_export(id));
  CHECK(s.pause({arena}) == 32 * kPage);
  CHECK(s.resume({arena}) == 32 * kPage);
  for (size_t i = 0; i < 32 * kPage; i += 512) s.fake->at(a + i) = static_cast<unsigned char>(4 + i / 512);
  chunks.clear();
  CHECK_OK(s.memory.export_arena(arena, Access::read_write, 99, &chunks, &base, &id));
  std::vector<SharedChunk> beyond = chunks;
  beyond.back().offset += kPage;
  CHECK(s.memory.renew_import(import, beyond).code == Code::bad_handle);
  CHECK_OK(s.memory.renew_import(import, chunks));
  CHECK(s.holds(there + (a - base), 32 * kPage, 4));
  CHECK_OK(s.memory.close_import(import));
}

TEST(a_renewal_that_fails_at_any_call_holds_nothing_and_may_be_tried_again) {
  for (const char* call : {"import_fd", "map", "allow"}) {
    for (int after = 0; after < 2; ++after) {
      Setup s;
      uint64_t arena = s.arena("weights"), id = 0, import = 0;
      uintptr_t a = s.block(arena, 32 * kPage, 3), base = 0, there = 0;
      std::vector<SharedChunk> chunks;
      CHECK_OK(s.memory.export_arena(arena, Access::read_write, 99, &chunks, &base, &id));
      CHECK_OK(s.memory.open_import(DriverKind::cuda, 0, Access::read_only, chunks, &import, &there));
      CHECK_OK(s.memory.drop_import(import));
      s.fake->fail(call, after);
      CHECK(!s.memory.renew_import(import, chunks).ok());
      CHECK(!s.fake->is_mapped(there));
      for (const auto& [physical, chunk] : s.fake->chunks) CHECK(chunk.num_references == 1);
      CHECK_OK(s.memory.renew_import(import, chunks));
      CHECK(s.holds(there + (a - base), 32 * kPage, 3));
    }
  }
}

TEST(a_handle_that_lies_about_its_layout_is_refused) {
  Setup s;
  uint64_t import = 0;
  uintptr_t base = 0;
  auto code = [&](std::vector<SharedChunk> chunks) {
    return s.memory.open_import(DriverKind::cuda, 0, Access::read_only, chunks, &import, &base).code;
  };
  CHECK(code({}) == Code::bad_handle);
  CHECK(code({{0, 0, 5}}) == Code::bad_handle);
  CHECK(code({{0, 100, 5}}) == Code::bad_handle);
  CHECK(code({{100, kPage, 5}}) == Code::bad_handle);
  CHECK(code({{0, 2 * kPage, 5}, {kPage, kPage, 5}}) == Code::bad_handle);
  CHECK(code({{UINT64_MAX - kPage + 1, kPage, 5}}) == Code::bad_handle);
  CHECK(code({{0, UINT64_MAX - kPage + 1, 5}}) == Code::bad_handle);
  CHECK(s.fake->reservations.empty());
}

TEST(a_driver_that_is_not_open_is_named) {
  Setup s;
  uint64_t arena = 0;
  CHECK(s.memory.create_arena(DriverKind::host, "weights", 0, {}, &arena).code == Code::unavailable);
}
