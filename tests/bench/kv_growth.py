"""What a growing KV cache saves between RESUME_KV and the first token, with a real engine on a CPU:

python -m tests.bench.kv_growth [--mib 1024] [--repeats 20] --out FOLDER

Two rollout services with the same tiny model, one of which grows its cache; rounds alternate. Each round wakes the engine and asks for one
token. The clock of `resume_kv` runs from the request to its answer, that of `first_token` from the same moment to the token, and that of
`whole_cache` to the last part of the cache. Memory comes from the system, made and given back, as on a GPU without a pool.
Writes kv_growth.json: medians and the slowest, in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasuki.v1 import types_pb2
from tests.integration.rollout_process import (
    RolloutClient,
    TestTrainer,
    connected,
    start_rollout,
    stop_rollout,
    wait_until_serving,
)
from tests.models import make_model, save_checkpoint

# 2 layers, keys and values, 2 heads of 16, bfloat16.
_TOKEN_BYTES = 2 * 2 * 2 * 16 * 2
_WEIGHTS, _KV = types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE


class Side:
    """One rollout service, and what its rounds took, in milliseconds."""

    def __init__(self, folder: Path, *, num_tokens: int, grows: bool) -> None:
        model = save_checkpoint(make_model("qwen2", seed=0), folder / "model")
        self.rollout = start_rollout(
            folder / "node", model, f"rollout.kv_tokens={num_tokens}", f"rollout.kv_growth={str(grows).lower()}"
        )
        wait_until_serving(self.rollout)
        self.trainer = TestTrainer(self.rollout.socket_dir, "trainer", make_model("qwen2", seed=1))
        self.grows, self.version = grows, 0
        self.times: dict[str, list[float]] = {"resume_kv": [], "first_token": [], "whole_cache": []}

    async def round(self) -> None:
        async with connected(self.rollout) as client:
            await client.sleep()
            self.version += 1
            await client.resume(types_pb2.STAGE_RESUME_WEIGHTS, _WEIGHTS)
            await client.receive(self.trainer.publish(self.version))
            started = time.perf_counter()
            await client.resume(types_pb2.STAGE_RESUME_KV, _KV)
            self._note("resume_kv", started)
            await client.generate([[5, 6, 7]], max_new_tokens=1, ignore_eos=True)
            self._note("first_token", started)
            if self.grows:
                await _grown(client)
            self._note("whole_cache", started)

    def _note(self, name: str, started: float) -> None:
        self.times[name].append(1e3 * (time.perf_counter() - started))

    def report(self, *, num_warm: int) -> dict[str, dict[str, float]]:
        """Without the first rounds."""
        kept = {name: times[num_warm:] for name, times in self.times.items()}
        return {name: {"median_ms": statistics.median(times), "slowest_ms": max(times)} for name, times in kept.items()}

    def close(self) -> None:
        self.trainer.close()
        stop_rollout(self.rollout)


async def _grown(client: RolloutClient) -> None:
    while True:
        cache = (await client.state()).kv_cache
        if cache.num_tokens and not cache.is_growing:
            return
        await asyncio.sleep(0.001)


@contextmanager
def both_sides(num_tokens: int) -> Iterator[list[Side]]:
    sides: list[Side] = []
    with tempfile.TemporaryDirectory(prefix="tasuki-") as folder:
        try:
            for grows in (False, True):
                sides.append(Side(Path(folder) / ("growing" if grows else "whole"), num_tokens=num_tokens, grows=grows))
            yield sides
        finally:
            for side in sides:
                side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the KV cache")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warm", type=int, default=2, help="first rounds, which do not count")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    async def rounds(sides: list[Side]) -> None:
        for _ in range(arguments.warm + arguments.repeats):
            for side in sides:
                await side.round()

    with both_sides((arguments.mib << 20) // _TOKEN_BYTES) as sides:
        asyncio.run(rounds(sides))
        whole, growing = (side.report(num_warm=arguments.warm) for side in sides)
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = {"mib": arguments.mib, "repeats": arguments.repeats, "whole": whole, "growing": growing}
    text = json.dumps(report, indent=1)
    (arguments.out / "kv_growth.json").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
