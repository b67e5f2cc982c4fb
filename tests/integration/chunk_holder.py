"""Holds chunks of the node's pool, as a trainer does whose state has not left yet. Each line on stdin gives the number of bytes."""

from __future__ import annotations

import sys
from pathlib import Path

from tasuki.memory.arena import Arena
from tasuki.transport.pool_socket import join_pool


def main(path: str) -> None:
    join_pool(Path(path), device="cpu", timeout_s=30)
    arena = Arena("optimizer", device="cpu")
    block: int | None = None
    for line in sys.stdin:
        if block is not None:
            arena.free(block)
        block = arena.allocate(int(line)) if int(line) else None
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
