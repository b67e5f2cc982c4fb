"""A process on a GPU's pool that answers on a pipe: `python -m tests.gpu.pool_peer SOCKET`.

Verbs: allocate BYTES, pause, resume, write NUMBER, read (the content), torch BYTES (mapped bytes while a tensor of torch's own exists,
and after torch's cache was emptied), usage.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.pool import pool_usage
from tasuki.memory.tags import MemoryTag
from tasuki.memory.torch_segments import take_segments_from_pool
from tasuki.transport.pool_socket import join_pool
from tests.gpu.arena_peer import At

DEVICE = "cuda:0"
_STRIDE = 1 << 16


def main() -> None:
    torch.cuda.set_device(DEVICE)
    join_pool(Path(sys.argv[1]), device=DEVICE, timeout_s=60)
    segments = take_segments_from_pool(DEVICE)
    tags = [MemoryTag.WEIGHTS]
    allocator = NativeAllocator(tags=tags, device=DEVICE)
    arena = allocator.arena(MemoryTag.WEIGHTS)
    address = num_bytes = 0
    for line in sys.stdin:
        verb, *numbers = line.split()
        answer: object = "done"
        if verb == "allocate":
            num_bytes = int(numbers[0])
            address = arena.allocate(num_bytes)
        elif verb == "pause":
            allocator.pause(tags)
        elif verb == "resume":
            allocator.resume(tags)
        elif verb == "write":
            torch.as_tensor(At(address, num_bytes), device=DEVICE).fill_(int(numbers[0]))
            torch.cuda.synchronize()
        elif verb == "read":
            answer = torch.as_tensor(At(address, num_bytes), device=DEVICE)[::_STRIDE].unique().tolist()
        elif verb == "torch":
            tensor = torch.ones(int(numbers[0]), dtype=torch.uint8, device=DEVICE)
            total, held = int(tensor.sum()), segments.usage().mapped_bytes
            del tensor
            torch.cuda.empty_cache()
            answer = [total, held, segments.usage().mapped_bytes]
        elif verb == "usage":
            usage = pool_usage(DEVICE)
            answer = None if usage is None else asdict(usage)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
