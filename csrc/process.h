// The one Memory of this process, shared by the C functions and torch's hooks.
#pragma once

#include <atomic>

#include "memory.h"

namespace tasuki {

struct Process {
  Memory memory;
  HostDriver* host;  // owned by `memory`
  std::atomic<uint64_t> num_refused_frees{0};

  Process();
};

// Created at the first call and never destroyed: torch frees its last blocks after static destructors have run.
Process& process();

// Records a failure for tasuki_last_error of this thread. Returns its code.
int report(const Status& status);

}  // namespace tasuki
