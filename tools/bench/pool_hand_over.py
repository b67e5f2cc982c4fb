"""Memory that passes from one process to another and back, with a pool of lent chunks and without one, in turns of one run:

python tools/bench/pool_hand_over.py [--device cpu] [--gib 1] [--repeats 10] [--out FOLDER]        on a CPU
python tools/bench/pool_hand_over.py --device cuda:0 --gib 93 --out FOLDER                         100 GB of a GPU, as a KV cache

Two processes have an arena of that size each. In every round one pauses and the other resumes and, on a CPU, touches every page; then the
roles change. Without a pool each resume creates memory, and waits while the driver scrubs the memory just released; with a pool none is
created. Writes pool_hand_over.json: median and maximum of each call, in milliseconds, in the process that makes it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tasuki.memory.allocator import NativeAllocator
from tasuki.memory.pool import GPU_CHUNK_BYTES, PoolKeeper, pool_chunk_bytes
from tasuki.memory.tags import MemoryTag
from tasuki.transport.pool_socket import PoolServer, join_pool

_GIB = 1 << 30
_JOIN_S = 60.0


def timed_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def side(orders: Connection, device: str, num_bytes: int, socket_path: Path | None) -> None:
    """Runs the commands that it reads, and answers each with its milliseconds."""
    if socket_path is not None:
        join_pool(socket_path, device=device, timeout_s=_JOIN_S)
    tags = [MemoryTag.KV_CACHE]
    allocator = NativeAllocator(tags=tags, device=device)
    arena = allocator.arena(MemoryTag.KV_CACHE)
    address = 0

    def allocate() -> None:
        nonlocal address
        address = arena.allocate(num_bytes)

    def touch() -> None:
        view = memoryview(arena.view(address, num_bytes)).cast("B")
        view[:: os.sysconf("SC_PAGESIZE")] = bytes(len(view[:: os.sysconf("SC_PAGESIZE")]))

    calls = {
        "allocate": allocate,
        "touch": touch,
        "pause": lambda: allocator.pause(tags),
        "resume": lambda: allocator.resume(tags),
    }
    for order in iter(orders.recv, None):
        orders.send(timed_ms(calls[order]))


def _chunk_bytes(num_bytes: int, device: str) -> int:
    return pool_chunk_bytes(num_bytes) if device == "cpu" else GPU_CHUNK_BYTES


def rounds(device: str, num_bytes: int, *, num_repeats: int, with_pool: bool) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="tasuki-") as folder:
        path = Path(folder) / "pool.sock" if with_pool else None
        keeper = server = None
        made_ms = 0.0
        if path is not None:
            # One chunk more than the exact size: sizes are rounded up.
            size = num_bytes + _chunk_bytes(num_bytes, device)
            start = time.perf_counter()
            keeper = PoolKeeper(size, device=device, chunk_bytes=_chunk_bytes(size, device))
            made_ms = 1e3 * (time.perf_counter() - start)
            server = PoolServer(keeper, path)
        pipes = [context.Pipe() for _ in range(2)]
        processes = [context.Process(target=side, args=(there, device, num_bytes, path)) for _, there in pipes]
        for process in processes:
            process.start()

        def tell(number: int, order: str) -> float:
            here = pipes[number][0]
            here.send(order)
            while not here.poll(0.01):
                if server is not None:
                    server.poll()
                if not processes[number].is_alive():
                    raise SystemExit(f"side {number} ended in {order}")
            return here.recv()

        taken: dict[str, list[float]] = {"pause": [], "resume": [], "touch": []}
        tell(0, "allocate")
        tell(0, "pause")
        tell(1, "allocate")
        for number in range(2 * num_repeats + 2):
            giver, taker = (1, 0) if number % 2 == 0 else (0, 1)
            paused, resumed = tell(giver, "pause"), tell(taker, "resume")
            touched = tell(taker, "touch") if device == "cpu" else 0.0
            if number >= 2:  # each side has made its first call
                for name, value in (("pause", paused), ("resume", resumed), ("touch", touched)):
                    taken[name].append(value)
        for (here, _), process in zip(pipes, processes, strict=True):
            here.send(None)
            process.join()
        if server is not None and keeper is not None:
            server.close()
            keeper.close()
    figures = {f"{name}_ms": round(statistics.median(values), 2) for name, values in taken.items() if any(values)}
    slowest = {f"{name}_slowest_ms": round(max(values), 2) for name, values in taken.items() if any(values)}
    return {**figures, **slowest, **({"pool_made_once_ms": round(made_ms, 1)} if with_pool else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path())
    arguments = parser.parse_args()
    num_bytes = int(arguments.gib * _GIB)
    results = {
        name: rounds(arguments.device, num_bytes, num_repeats=arguments.repeats, with_pool=name == "pool")
        for name in ("no pool", "pool")
    }
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "device": arguments.device, "gib": arguments.gib}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "pool_hand_over.json").write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")
    for name, measured in results.items():
        print(f"{name:10s}", *(f"{key}={value}" for key, value in measured.items()))


if __name__ == "__main__":
    main()
