// Chunks that one Memory hands out and another maps, over a fake driver.
#include "memory_setup.h"

using namespace tasuki;

namespace {

// An arena with one block of 32 pages, exported, and imported at another address.
struct Imported : Setup {
  uint64_t arena = Setup::arena("weights"), id = 0, import = 0;
  uintptr_t base = 0, there = 0;
  std::vector<SharedChunk> chunks;
  uintptr_t a = block(arena, 32 * kPage, 3);
  Imported() {
    CHECK_OK(memory.export_arena(arena, Access::read_write, 99, &chunks, &base, &id));
    CHECK_OK(memory.open_import(DriverKind::cuda, 0, Access::read_only, chunks, &import, &there));
  }
  auto num_calls(const char* call) const { return std::count(fake->calls.begin(), fake->calls.end(), call); }
  bool reads(unsigned char first) { return holds(there + (a - base), 32 * kPage, first); }
};

}  // namespace

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

TEST(an_import_maps_the_peers_chunks) {
  Imported s;
  CHECK(s.reads(3) && s.memory.totals().imported_bytes == 32 * kPage);
  CHECK_OK(s.memory.close_import(s.import));
  CHECK(s.memory.totals().imported_bytes == 0 && s.fake->reservations.size() == 1);
}

TEST(an_import_that_fails_at_any_call_leaves_nothing) {
  for (const char* call : {"import_fd", "reserve", "map", "allow"}) {
    for (int after = 0; after < 2; ++after) {
      if (after > 0 && (std::string(call) == "reserve" || std::string(call) == "allow")) continue;
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

TEST(a_released_import_holds_nothing_and_gets_other_chunks_at_the_same_addresses) {
  Imported s;
  CHECK(s.memory.renew_import(s.import, s.chunks).code == Code::bad_argument);
  CHECK_OK(s.memory.release_import(s.import));
  CHECK_OK(s.memory.release_import(s.import));
  CHECK(!s.fake->is_mapped(s.there) && s.memory.totals().imported_bytes == 0);
  for (const auto& [physical, chunk] : s.fake->chunks) CHECK(chunk.num_references == 1);
  CHECK_OK(s.memory.close_export(s.id));
  CHECK(s.pause({s.arena}) == 32 * kPage);
  CHECK(s.resume({s.arena}) == 32 * kPage);
  for (size_t i = 0; i < 32 * kPage; i += 512) s.fake->at(s.a + i) = static_cast<unsigned char>(4 + i / 512);
  s.chunks.clear();
  CHECK_OK(s.memory.export_arena(s.arena, Access::read_write, 99, &s.chunks, &s.base, &s.id));
  std::vector<SharedChunk> beyond = s.chunks;
  beyond.back().offset += kPage;
  CHECK(s.memory.renew_import(s.import, beyond).code == Code::bad_handle);
  CHECK_OK(s.memory.renew_import(s.import, s.chunks));
  CHECK(s.reads(4));
  CHECK_OK(s.memory.close_import(s.import));
}

TEST(a_renewal_that_fails_at_any_call_holds_nothing_and_may_be_tried_again) {
  for (const char* call : {"import_fd", "map", "allow"}) {
    for (int after = 0; after < 2; ++after) {
      if (after > 0 && std::string(call) == "allow") continue;  // the chunks are adjacent, so there is one call
      Imported s;
      CHECK_OK(s.memory.release_import(s.import));
      s.fake->fail(call, after);
      CHECK(!s.memory.renew_import(s.import, s.chunks).ok());
      CHECK(!s.fake->is_mapped(s.there));
      for (const auto& [physical, chunk] : s.fake->chunks) CHECK(chunk.num_references == 1);
      CHECK_OK(s.memory.renew_import(s.import, s.chunks));
      CHECK(s.reads(3));
    }
  }
}

TEST(adjacent_chunks_get_access_and_are_unmapped_in_one_call) {
  for (bool has_gap : {false, true}) {
    Imported s;
    CHECK_OK(s.memory.close_import(s.import));
    if (has_gap) s.chunks[1].offset += kPage;
    s.fake->calls.clear();
    CHECK_OK(s.memory.open_import(DriverKind::cuda, 0, Access::read_only, s.chunks, &s.import, &s.there));
    CHECK(s.num_calls("map") == 2 && s.num_calls("allow") == 1 + has_gap);
    CHECK(s.fake->at(s.there + s.chunks[1].offset) == s.fake->at(s.base + 16 * kPage));
    s.fake->fail("unmap", has_gap);
    CHECK(!s.memory.release_import(s.import).ok() && s.fake->is_mapped(s.there) && s.fake->is_mapped(s.there + s.chunks[1].offset));
    s.fake->calls.clear();
    CHECK_OK(s.memory.release_import(s.import));
    CHECK(s.num_calls("unmap") == 1 + has_gap && !s.fake->is_mapped(s.there));
    s.fake->fail("allow", has_gap);
    CHECK(!s.memory.renew_import(s.import, s.chunks).ok() && !s.fake->is_mapped(s.there));
    CHECK_OK(s.memory.close_import(s.import));
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
