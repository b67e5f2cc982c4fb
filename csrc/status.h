// The result of a call: a code, a message, and the numbers if memory was short.
#pragma once

#include <cstdint>
#include <string>

namespace tasuki {

// Same numbers as TASUKI_* in tasuki_memory.h (c_api.cpp checks it).
enum class Code : int {
  ok = 0,
  out_of_memory = 1,
  bad_argument = 2,
  not_found = 3,
  paused = 4,
  busy = 5,
  bad_handle = 6,
  fd_limit = 7,
  driver = 8,
  unavailable = 9,
  poisoned = 10,
};

struct [[nodiscard]] Status {
  Code code = Code::ok;
  std::string message;
  uint64_t needed_bytes = 0;  // for out_of_memory
  uint64_t free_bytes = 0;    // for out_of_memory

  bool ok() const { return code == Code::ok; }
};

inline Status failure(Code code, std::string message) { return Status{code, std::move(message), 0, 0}; }

// "12.50 GiB", "3.00 MiB", "512 bytes".
std::string readable(uint64_t bytes);

inline Status no_room(const std::string& what, uint64_t needed_bytes, uint64_t free_bytes) {
  return Status{Code::out_of_memory, "needs " + readable(needed_bytes) + " for " + what + ", " + readable(free_bytes) + " free",
                needed_bytes, free_bytes};
}

}  // namespace tasuki
