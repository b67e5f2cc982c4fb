// Blocks of which only a part is used: what has memory then, and what a failure leaves.
#include "memory_setup.h"

using namespace tasuki;

namespace {

using Spans = std::vector<std::pair<uintptr_t, size_t>>;

// Two buffers of four chunks each, as the keys and values of a cache.
struct Cache : Setup {
  uint64_t kv = arena("kv_cache");
  uintptr_t keys = block(kv, 64 * kPage), values = block(kv, 64 * kPage);
  uint64_t mapped = 0, given_back = 0;

  // Of each buffer the first pages are used.
  Spans beyond(size_t num_pages) const {
    size_t bytes = (64 - num_pages) * kPage;
    return {{keys + num_pages * kPage, bytes}, {values + num_pages * kPage, bytes}};
  }
  Status use(size_t num_pages) { return memory.set_idle(kv, beyond(num_pages), &mapped, &given_back); }
  bool has_pages(size_t num_pages) const {
    bool are_first_there = fake->is_mapped(keys + num_pages * kPage - 1) && fake->is_mapped(values + num_pages * kPage - 1);
    return are_first_there && (num_pages == 64 || (!fake->is_mapped(keys + num_pages * kPage) && !fake->is_mapped(values + num_pages * kPage)));
  }
};

}  // namespace

TEST(chunks_of_idle_bytes_go_and_come_back_at_the_same_addresses) {
  Cache s;
  s.fake->at(s.values) = 7;
  CHECK_OK(s.use(16));
  CHECK(s.given_back == 96 * kPage && s.mapped == 0 && s.has_pages(16) && s.fake->used_bytes() == 32 * kPage);
  CHECK(s.usage(s.kv).total_bytes == 128 * kPage && s.usage(s.kv).mapped_bytes == 32 * kPage && s.usage(s.kv).state == State::resident);
  CHECK_OK(s.use(48));
  CHECK(s.mapped == 64 * kPage && s.given_back == 0 && s.has_pages(48) && s.fake->at(s.values) == 7);
  CHECK_OK(s.use(64));
  CHECK(s.mapped == 32 * kPage && s.has_pages(64));
}

TEST(a_chunk_that_is_idle_in_part_stays) {
  Cache s;
  CHECK_OK(s.use(17));
  CHECK(s.has_pages(32) && s.usage(s.kv).mapped_bytes == 64 * kPage);
}

TEST(a_resume_leaves_idle_chunks_out_and_a_pause_takes_the_rest) {
  Cache s;
  CHECK(s.pause({s.kv}) == 128 * kPage);
  CHECK_OK(s.use(16));
  CHECK(s.mapped == 0 && s.given_back == 0 && s.fake->used_bytes() == 0);
  CHECK(s.resume({s.kv}) == 32 * kPage && s.has_pages(16));
  CHECK_OK(s.use(32));
  CHECK(s.pause({s.kv}) == 64 * kPage && s.fake->used_bytes() == 0);
}

TEST(growth_without_room_changes_nothing_and_says_the_numbers) {
  Cache s;
  CHECK_OK(s.use(16));
  s.fake->total_bytes = 64 * kPage;
  std::string before = s.pages();
  Status status = s.use(64);
  CHECK(status.code == Code::out_of_memory && status.needed_bytes == 96 * kPage && status.free_bytes == 32 * kPage);
  CHECK(s.pages() == before && s.mapped == 0);
  CHECK_OK(s.use(32));
  CHECK(s.mapped == 32 * kPage && s.has_pages(32));
}

TEST(a_change_that_fails_at_any_call_is_undone) {
  for (bool is_growth : {true, false}) {
    for (const char* call : {"create", "map", "allow", "synchronize", "unmap"}) {
      for (int after = 0; after < 40; ++after) {
        Cache s;
        if (is_growth) CHECK_OK(s.use(16));
        std::string before = s.pages();
        s.fake->fail(call, after);
        Status status = s.use(is_growth ? 64 : 16);
        bool is_over = s.fake->is_failure_pending(call) && status.ok();  // there is no such call any more
        s.fake->fail_no_more();
        if (is_over) break;
        CHECK(!status.ok() && has(status.message, call) && s.pages() == before && s.mapped == 0 && s.given_back == 0);
        CHECK_OK(s.use(is_growth ? 64 : 16));
        CHECK(s.has_pages(is_growth ? 64 : 16));
      }
    }
  }
}

TEST(a_move_of_the_idle_part_whose_second_half_fails_is_undone) {
  Cache s;
  CHECK_OK(s.use(16));
  std::string before = s.pages();
  Spans first_half = {{s.keys, 32 * kPage}};
  s.fake->fail("unmap", 0);
  CHECK(!s.memory.set_idle(s.kv, first_half, &s.mapped, &s.given_back).ok() && s.pages() == before);
  s.fake->fail_no_more();
  CHECK_OK(s.memory.set_idle(s.kv, first_half, &s.mapped, &s.given_back));
  CHECK(s.mapped == 80 * kPage && s.given_back == 16 * kPage && !s.fake->is_mapped(s.keys));
}

TEST(what_a_pause_keeps_has_no_idle_part) {
  Cache s;
  for (PausePolicy policy : {kContent, kChunks}) {
    s.set({s.kv}, policy);
    CHECK(s.use(16).code == Code::bad_argument && s.has_pages(64));
    s.set({s.kv}, kDrop);
    CHECK_OK(s.use(16));
    CHECK(s.memory.set_policy(s.kv, policy).code == Code::bad_argument);
    CHECK_OK(s.use(64));
  }
}

TEST(spans_of_another_arena_are_refused) {
  Cache s;
  uint64_t other = s.arena("weights");
  CHECK(s.memory.set_idle(other, s.beyond(16), &s.mapped, &s.given_back).code == Code::bad_argument && s.has_pages(64));
  CHECK(s.memory.set_idle(s.kv, {{s.keys, SIZE_MAX}}, &s.mapped, &s.given_back).code == Code::bad_argument);
}

TEST(a_block_that_is_made_where_an_idle_one_was_has_memory) {
  Cache s;
  CHECK_OK(s.use(16));
  CHECK_OK(s.memory.release(s.values));
  CHECK(s.block(s.kv, 64 * kPage) == s.values);
  CHECK(s.fake->is_mapped(s.values + 64 * kPage - 1) && !s.fake->is_mapped(s.keys + 63 * kPage));
}
