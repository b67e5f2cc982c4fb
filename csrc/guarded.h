// Error handling around every function of the C interface.
#pragma once

#include <exception>
#include <new>

#include "process.h"
#include "tasuki_memory.h"

namespace tasuki {

int report_no_memory();

// Runs a body that returns a Status; exceptions do not cross the ABI.
template <typename Body>
int guarded(Body body) noexcept {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report_no_memory();
  } catch (const std::exception& error) {
    return report(failure(Code::driver, error.what()));
  }
}

inline Status bad(const char* message) { return failure(Code::bad_argument, message); }

inline bool is_driver(int driver) { return driver == TASUKI_HOST || driver == TASUKI_CUDA; }

}  // namespace tasuki
