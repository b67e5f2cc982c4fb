"""Pause and resume of host memory: `python tools/bench/memory_cpu.py [--gib 1] [--out FOLDER]`. Writes memory_cpu.json and prints a table.

The peer is a process without arenas, which frees the tensors and allocates them again at new addresses. `touch_ms` writes every page
afterwards, since a CPU pays for memory at the first write.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from tasuki.memory.arena import Keep, NativeAllocator
from tasuki.wire.stages import MemoryTag

MIB = 1 << 20
NUM_REPEATS = 5


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / MIB


def timed_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def arena_cycles(num_bytes: int, keep: Keep) -> dict[str, Any]:
    allocator = NativeAllocator(tags=[MemoryTag.KV_CACHE], device="cpu", keep={MemoryTag.KV_CACHE: keep})
    with allocator.region(MemoryTag.KV_CACHE):
        layers = [torch.ones(num_bytes // 16, dtype=torch.uint8) for _ in range(16)]
    addresses, awake = [layer.data_ptr() for layer in layers], resident_mib()
    pauses, resumes, touches, asleep = [], [], [], 0.0
    for _ in range(NUM_REPEATS):
        pauses.append(timed_ms(lambda: allocator.pause([MemoryTag.KV_CACHE])))
        asleep = resident_mib()
        resumes.append(timed_ms(lambda: allocator.resume([MemoryTag.KV_CACHE])))
        touches.append(timed_ms(lambda: [layer.fill_(1) for layer in layers]))
    assert addresses == [layer.data_ptr() for layer in layers]
    usage = allocator.arena(MemoryTag.KV_CACHE).usage()
    layers.clear()
    allocator.close()
    return {
        "pause_ms": round(statistics.median(pauses), 2),
        "resume_ms": round(statistics.median(resumes), 2),
        "touch_ms": round(statistics.median(touches), 1),
        "resident_fell_by_percent": round(100 * (awake - asleep) * MIB / num_bytes, 1),
        "num_chunks": usage.num_chunks,
    }


def free_and_allocate(num_bytes: int) -> dict[str, Any]:
    layers = [torch.ones(num_bytes // 16, dtype=torch.uint8) for _ in range(16)]
    pauses, resumes, touches = [], [], []
    for _ in range(NUM_REPEATS):
        pauses.append(timed_ms(layers.clear))
        resumes.append(timed_ms(lambda: layers.extend(torch.empty(num_bytes // 16, dtype=torch.uint8) for _ in range(16))))
        touches.append(timed_ms(lambda: [layer.fill_(1) for layer in layers]))
    return {
        "pause_ms": round(statistics.median(pauses), 2),
        "resume_ms": round(statistics.median(resumes), 2),
        "touch_ms": round(statistics.median(touches), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    # A host copy is as large as its original.
    most = psutil.virtual_memory().available / 2 / (1 << 30)
    if not 1 / 1024 <= arguments.gib <= most:
        parser.error(
            f"--gib {arguments.gib:g}: here it is from 1/1024, which is a MiB, to {most:.1f}, half of the memory that is free"
        )
    num_bytes = int(arguments.gib * 1024) * MIB
    results = {
        "arena, drop": arena_cycles(num_bytes, Keep.NOTHING),
        "arena, keep chunks": arena_cycles(num_bytes, Keep.CHUNKS),
        "arena, host copy": arena_cycles(num_bytes, Keep.CONTENT),
        "free and allocate": free_and_allocate(num_bytes),
    }
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__, "gib": arguments.gib}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "memory_cpu.json").write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    for name, measured in results.items():
        print(f"{name:20s}", *(f"{key}={value}" for key, value in measured.items()))


if __name__ == "__main__":
    main()
