// Pause and resume over a fake driver of which any single call fails.
#include "memory_setup.h"

using namespace tasuki;

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
    for (const char* call : {"synchronize", "unmap", "release", "pin", "copy_to_host"}) {
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
