// A Memory over a fake driver, and shorthands for calls that must succeed.
#pragma once

#include <memory>
#include <string>

#include "../memory.h"

#include "check.h"
#include "fake_driver.h"

namespace tasuki {

inline constexpr PausePolicy kDrop{false, false}, kContent{true, false}, kChunks{false, true}, kBoth{true, true};

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

}  // namespace tasuki
