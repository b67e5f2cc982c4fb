// Copies between host memory, and checksums of what they have written, in one pass over the bytes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "status.h"
#include "tasuki_memory.h"

namespace tasuki {

// As defined in weights/checksum.py: the sum of bit pattern times weight(index), modulo 2^64. Adds to `sums`.
Status copy_and_sum(const tasuki_block* blocks, size_t num_blocks, uint64_t* sums, size_t num_sums, unsigned num_threads);

}  // namespace tasuki
