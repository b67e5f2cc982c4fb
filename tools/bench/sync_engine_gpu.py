"""A sync of weights into a running rollout service on GPUs: `python -m tools.bench.sync_engine_gpu [--cases 7b:1:1 7b:4:1x4]`.

A case is model : trainer ranks : tensor-parallel ranks or, with replicas, model : trainer ranks : tensor-parallel ranks x replicas. Trainer
ranks are processes as in sync_gpu.py; rollout is the service itself. A sync is timed from the call of ReceiveWeights to its answer, the
acknowledgement: handles checked, all ranks' copies made, summed and waited for, all checksums compared. As in a changeover, the engine's
weights are resumed right before it and paused after it.

Parts of the time, each of the slowest rank: "copy" (with sums, and the check that no parameter has moved) and "verify". "ranks" is from the
command to the last rank's answer, "compare" the comparison; "rpc" is the rest: gRPC both ways, and the service's work before and after.
Every round has new weights. The first one, with import, recording and compilation, is reported separately; another round measures memory.
"handles" counts how often the service fetched a trainer rank's descriptors. Afterwards, with the service asleep, the floor is measured as
in sync_gpu.py, on the same GPUs and copies. In the end every replica must generate the same tokens. Writes sync_engine_gpu.json and prints
a table.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import uvloop

from tasuki.v1 import types_pb2, weights_pb2
from tests.integration.rollout_process import RolloutClient, RolloutProcess, connected, serving_rollout
from tools.bench.cases import METAVAR, Case
from tools.bench.floors import floor_ms
from tools.bench.gpus import require_gpus
from tools.bench.peak_memory import PeakMemory
from tools.bench.processes import REPOSITORY
from tools.bench.sync_gpu import MODULE, NUM_ROUNDS
from tools.bench.sync_ranks import Ranks, published_weights
from tools.bench.sync_shapes import write_config

NUM_TOKENS = 8
WEIGHTS, KV_CACHE = types_pb2.MEMORY_TAG_WEIGHTS, types_pb2.MEMORY_TAG_KV_CACHE


def settings(case: Case) -> list[str]:
    return [
        'device="cuda"',
        f"trainer.num_ranks={case.num_ranks}",
        f"rollout.tp_size={case.tp_size}",
        f"rollout.dp_size={case.num_engines}",
        'rollout.engine.attention_backend="triton"',
        'rollout.engine.sampling_backend="pytorch"',
        "rollout.kv_ratio=0.4",
        "rollout.engine.max_total_tokens=65536",
        "rollout.max_running_requests=16",
    ]


class Sync:
    """Trainer ranks and rollout service of one case."""

    def __init__(self, case: Case, rollout: RolloutProcess, client: RolloutClient) -> None:
        self._case, self._rollout, self._client = case, rollout, client
        self.num_fetched: list[int] = []
        """Descriptor fetches of trainer ranks: the total before each publication."""
        folder = str(rollout.socket_dir)
        commands = [["--trainer", str(rank), str(case.num_ranks), case.model, folder] for rank in range(case.num_ranks)]
        self._trainers = Ranks(MODULE, commands)

    async def one_round(self) -> dict[str, Any]:
        """Syncs new weights; the engine's weights are paused before and after."""
        weights = self._publish()
        await self._client.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
        cpu_s, start = self._cpu_seconds(), time.perf_counter()
        received = await self._client.receive(weights)
        total_ms = 1e3 * (time.perf_counter() - start)
        cpu_ms = 1e3 * (self._cpu_seconds() - cpu_s)
        assert not received.fallback_names
        await self._client.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
        parts_ms = {timing.name: 1e3 * timing.seconds for timing in received.timings}
        parts_ms["rpc"] = total_ms - parts_ms["ranks"] - parts_ms["compare"]
        return {"total_ms": total_ms, "cpu_ms": cpu_ms, "parts_ms": parts_ms, "copied_bytes": received.copied_bytes}

    async def extra_bytes(self, gpu_uuids: Sequence[str]) -> int:
        """Peak memory of a GPU while a sync runs, above that before."""
        weights = self._publish()
        await self._client.resume(types_pb2.STAGE_RESUME_WEIGHTS, WEIGHTS)
        with PeakMemory(gpu_uuids) as memory:
            await self._client.receive(weights)
        await self._client.pause(types_pb2.STAGE_PAUSE_WEIGHTS, WEIGHTS)
        return memory.extra_bytes

    def floors(self) -> dict[str, Any]:
        """Measures the links from processes that take the place of the engine's ranks."""
        weights, case = self._publish(), self._case
        ranks = range(case.tp_size * case.num_engines)
        engines = Ranks(MODULE, [["--engine", str(rank), str(case.tp_size), case.model] for rank in ranks])
        engines.ask(f"receive {weights.SerializeToString().hex()}")
        names = ["within", "across"] if case.num_ranks > 1 else ["within"]
        floors = {name: engines.ask(name) for name in names}
        engines.close()
        return floors

    async def tokens(self) -> list[int]:
        """Tokens generated with the latest version, from one prompt on every replica."""
        await self._client.wake(self._publish())
        samples = await self._client.generate(
            [[5, 6, 7]], num_samples=self._case.num_engines, max_new_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
        )
        (tokens,) = {tuple(sample.token_ids) for sample in samples}
        return list(tokens)

    def _publish(self) -> weights_pb2.PublishedWeights:
        version = len(self.num_fetched)
        answers = self._trainers.ask(str(version))
        self.num_fetched.append(sum(one["num_fetched"] for one in answers))
        return published_weights(answers, version)

    def _cpu_seconds(self) -> float:
        """CPU seconds of the service and its ranks."""
        front = psutil.Process(self._rollout.process.pid)
        times = [process.cpu_times() for process in [front, *front.children(recursive=True)]]
        return sum(one.user + one.system for one in times)

    def close(self) -> None:
        self._trainers.close()


def run(case: Case) -> dict[str, Any]:
    with ExitStack() as stack:
        # The path of a unix socket must be short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sync-")))
        started = time.monotonic()
        model = write_config(case.model, folder / "model")
        rollout = stack.enter_context(serving_rollout(folder / "node", model, *settings(case)))
        start_s = time.monotonic() - started
        return uvloop.run(measure(case, rollout)) | {"start_s": start_s}


async def measure(case: Case, rollout: RolloutProcess) -> dict[str, Any]:
    import torch

    async with connected(rollout) as client:
        sync = Sync(case, rollout, client)
        rounds = [await sync.one_round() for _ in range(NUM_ROUNDS + 1)]
        uuids = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in range(torch.cuda.device_count())]
        extra_bytes = await sync.extra_bytes(uuids)
        for number, one in enumerate(rounds):
            one["num_handles"] = sync.num_fetched[number + 1] - sync.num_fetched[number]
        floors = sync.floors()
        tokens = await sync.tokens()
        sync.close()
    return {
        "model": case.model,
        "num_ranks": case.num_ranks,
        "tp_size": case.tp_size,
        "dp_size": case.num_engines,
        "gpu": torch.cuda.get_device_name(),
        "first": rounds[0],
        "rounds": rounds[1:],
        "floors": floors,
        "floor_ms": floor_ms({"floors": floors}),
        "extra_bytes": extra_bytes,
        "tokens": tokens,
    }


def table(result: dict[str, Any]) -> str:
    rounds = result["rounds"]

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.2f} ms median, {sorted(values)[-1 - len(values) // 100]:.2f} ms p99"

    copied = rounds[0]["copied_bytes"] / 1e9
    median = statistics.median(one["total_ms"] for one in rounds)
    return "\n".join(
        [
            f"{result['model']}, {result['num_ranks']} trainer ranks -> {result['dp_size']} x TP {result['tp_size']} (started in "
            f"{result['start_s']:.0f} s), {len(rounds)} rounds, {copied:.2f} GB copied by all ranks; tokens {result['tokens']}",
            f"  total     {spread([one['total_ms'] for one in rounds])}; first {result['first']['total_ms']:.0f} ms; "
            f"{copied / median * 1e3:.0f} GB/s over all ranks",
            f"  floor     {result['floor_ms']:.2f} ms ({100 * result['floor_ms'] / median:.0f} %)",
            f"  calls     1 RPC; handles {max(one['num_handles'] for one in rounds)}, first {result['first']['num_handles']}",
            *(f"  part {name}: {spread([one['parts_ms'][name] for one in rounds])}" for name in rounds[0]["parts_ms"]),
            f"  CPU       {statistics.mean(one['cpu_ms'] for one in rounds):.0f} ms",
            f"  memory    {result['extra_bytes'] / 2**20:.0f} MiB more of a GPU",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=Case.of, default=[Case.of("7b:1:1")], metavar=METAVAR)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs/bench")
    args = parser.parse_args()
    require_gpus(max(case.num_gpus for case in args.cases))
    args.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    for case in args.cases:
        results.append(run(case))
        print(table(results[-1]), flush=True)
        (args.out / "sync_engine_gpu.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
