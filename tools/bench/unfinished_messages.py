"""Memory that a port holds for callers who begin messages of 4 MiB and never end them: docs/reference/security.md.

python -m tools.bench.unfinished_messages [--connections 4] [--calls 1000] [--seconds 60]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ENVIRONMENT
from tests.integration.counting_trainer import NAME
from tests.integration.test_port_server import serving
from tests.integration.unfinished_messages import unfinished_calls

_MIB = 2**20
_PORT = 50951


async def serve(folder: Path) -> None:
    async with serving(folder, _PORT):
        sys.stdout.write("serving\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def resident_mib(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024 // _MIB


async def measure(server: subprocess.Popen[str], arguments: argparse.Namespace) -> dict[str, int]:
    before = peak = resident_mib(server.pid)
    attack = unfinished_calls(_PORT, f"/{NAME}/OptimStep", num_connections=arguments.connections, num_calls=arguments.calls)
    async with attack as callers:
        for _ in range(10 * arguments.seconds):
            await asyncio.sleep(0.1)
            peak = max(peak, resident_mib(server.pid))
        held, num_refused = sum(caller.held_bytes for caller in callers), sum(len(caller.ended) for caller in callers)
    return {"before_mib": before, "peak_mib": peak, "held_mib": held // _MIB, "num_refused": num_refused}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve))
        return
    argv = [sys.executable, "-m", "tools.bench.unfinished_messages", "--serve", tempfile.mkdtemp()]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT, text=True)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        sys.stdout.write(json.dumps(asyncio.run(measure(server, arguments))) + "\n")
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
