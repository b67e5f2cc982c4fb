"""A sync of weights on GPUs, without an engine: `python -m tools.bench.sync_gpu [--cases 7b:1:1 7b:4:4] [--out FOLDER]`.

A case is model : trainer ranks : tensor-parallel ranks or, with several engines, model : trainer ranks : tensor-parallel ranks x engines,
as in 7b:4:1x4. Each rank is a process. Trainer ranks take the first GPUs, one each, and so do engine ranks. Trainer ranks hold fp32 masters
and publish them as bfloat16 in an arena. Engine ranks receive them with WeightReceiver into parameters of SGLang's shapes, through a plan
recorded from a loader.

Time starts before the command is sent to the ranks: "sync" ends when the last rank has waited for its copies, "verified" when the parent
has compared all checksums with the published ones. Every round has new weights; the first one, with import, recording and compilation, is
reported separately. The floor is the time of the same bytes at the rates of plain copies in this run: within a GPU, and from the other GPUs
while all ranks read. "plain copies" are the plan's copies made by torch, one after the other. Writes sync_gpu.json, prints a table.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tasuki.rollout.receive import WeightReceiver
from tasuki.v1 import weights_pb2
from tasuki.weights.export import WeightExport
from tasuki.weights.imported_weights import import_weights
from tasuki.weights.plan import Slice
from tests.received import ReceivedPiece, check_received
from tools.bench.cases import METAVAR, Case
from tools.bench.floors import Floors, floor_ms
from tools.bench.gpus import require_gpus
from tools.bench.processes import REPOSITORY
from tools.bench.sync_ranks import Ranks, answer, published_weights
from tools.bench.sync_shapes import QWEN, QwenModel, random_shards

NUM_ROUNDS = 20
MODULE = "tools.bench.sync_gpu"
IMPORT_TIMEOUT_S = 20.0
MIB = 1 << 20
# bfloat16 has 8 bits of mantissa, so every element changes.
CHANGE = 1.01


def trainer_rank(rank: int, num_ranks: int, model: str, folder: Path) -> None:
    """Publishes a version for every line it reads."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    shards = random_shards(QWEN[model], rank=rank, num_ranks=num_ranks, dtype=torch.float32, device=device)
    path = folder / f"weights-{rank}.sock"
    export = WeightExport(shards, rank=rank, num_ranks=num_ranks, dtype=torch.bfloat16, socket_path=path)
    fetched = _count_fetched(export)
    arena_mib = sum(export._arena.manifest.chunk_bytes) / MIB
    for line in sys.stdin:
        for shard in shards:
            shard.local.mul_(CHANGE)
        torch.cuda.synchronize()
        start = time.perf_counter()
        num_bytes = export.publish(int(line))
        publish_ms = 1e3 * (time.perf_counter() - start)
        facts = {"num_bytes": num_bytes, "arena_mib": arena_mib, "num_fetched": len(fetched)}
        answer(publish_ms=publish_ms, handle=export.handle(), **facts)
    export.close()


def _count_fetched(export: WeightExport) -> list[None]:
    """Returns a list that grows by one at every fetch of the descriptors."""
    server, fetched = export._server, list[None]()
    send = server._send

    def send_and_count(peer: socket.socket) -> None:
        fetched.append(None)
        send(peer)

    server._send = send_and_count
    return fetched


def engine_rank(index: int, tp_size: int, model: str) -> None:
    """Receives the weights that a line names, or measures the ways to copy the same bytes. index: GPU; engines take neighbouring GPUs."""
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    parameters = QwenModel(QWEN[model], tp_rank=index % tp_size, tp_size=tp_size, dtype=torch.bfloat16, device=device)
    receiver = WeightReceiver(parameters)
    for line in sys.stdin:
        command, _, rest = line.strip().partition(" ")
        if command == "receive":
            _receive(receiver, weights_pb2.PublishedWeights.FromString(bytes.fromhex(rest)), device)
        else:
            answer(**getattr(Floors(receiver, device), command)())


def _receive(receiver: WeightReceiver, weights: weights_pb2.PublishedWeights, device: torch.device) -> None:
    free, cpu = torch.cuda.mem_get_info()[0], time.process_time()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    received = receiver.receive(weights, import_timeout_s=IMPORT_TIMEOUT_S)
    end = time.monotonic()
    answer(
        synced_at=end - received.timings["verify"],
        timings=received.timings,
        copied_bytes=received.copied_bytes,
        extra_mib=(torch.cuda.max_memory_allocated() - held) / MIB,
        lost_mib=(free - torch.cuda.mem_get_info()[0]) / MIB,
        cpu_ms=1e3 * (time.process_time() - cpu),
        checksums=[(name, at.offset, at.shape, at.strides, value) for name, at, value in received.checksums],
    )


def run_case(case: Case) -> dict[str, Any]:
    model, num_ranks, tp_size, num_engines = case.model, case.num_ranks, case.tp_size, case.num_engines
    with tempfile.TemporaryDirectory() as folder:
        trainers = Ranks(MODULE, [["--trainer", str(rank), str(num_ranks), model, folder] for rank in range(num_ranks)])
        engines = Ranks(MODULE, [["--engine", str(rank), str(tp_size), model] for rank in range(tp_size * num_engines)])
        rounds = [_round(trainers, engines, version, tp_size=tp_size) for version in range(NUM_ROUNDS + 1)]
        floors = {name: engines.ask(name) for name in ("within", "plain_copies", "kernel")}
        if num_ranks > 1:
            floors["across"] = engines.ask("across")
        engines.close()
        trainers.close()
    return {
        "model": model,
        "num_ranks": num_ranks,
        "tp_size": tp_size,
        "num_engines": num_engines,
        "first": rounds[0],
        "rounds": rounds[1:],
        "floors": floors,
    }


def _round(trainers: Ranks, engines: Ranks, version: int, *, tp_size: int) -> dict[str, Any]:
    published = trainers.ask(str(version))
    weights = published_weights(published, version)
    line = f"receive {weights.SerializeToString().hex()}"
    start = time.monotonic()
    received = engines.ask(line)
    answered = time.monotonic()
    # Each engine's front would compare its own sums.
    compared_s = max(_compare(received[first : first + tp_size], weights) for first in range(0, len(received), tp_size))
    slowest = {name: 1e3 * max(one["timings"][name] for one in received) for name in received[0]["timings"]}
    return {
        "sync_ms": 1e3 * (max(one["synced_at"] for one in received) - start),
        "verified_ms": 1e3 * (answered - start + compared_s),
        "parts_ms": slowest,
        "compare_ms": 1e3 * compared_s,
        "publish_ms": max(one["publish_ms"] for one in published),
        "copied_bytes": sum(one["copied_bytes"] for one in received),
        **{name: max(one[name] for one in received) for name in ("extra_mib", "lost_mib", "cpu_ms")},
        "arena_mib": max(one["arena_mib"] for one in published),
    }


def _compare(received: Sequence[dict[str, Any]], weights: weights_pb2.PublishedWeights) -> float:
    """Seconds to check that the ranks of one engine hold the published weights. Raises WeightsCorrupt."""
    pieces = [
        ReceivedPiece(tp_rank, name, Slice(offset, tuple(shape), tuple(strides)), value)
        for tp_rank, one in enumerate(received)
        for name, offset, shape, strides, value in one.pop("checksums")
    ]
    imported = import_weights(weights, timeout_s=IMPORT_TIMEOUT_S)
    start = time.monotonic()
    check_received(pieces, imported)
    imported.check_version(weights.policy_version)
    compared_s = time.monotonic() - start
    imported.close()
    return compared_s


def table(case: dict[str, Any]) -> str:
    rounds = case["rounds"]

    def spread(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f} ms median, {sorted(values)[-1 - len(values) // 100]:.2f} ms p99"

    floors = case["floors"]
    kernel, unsummed, checksum, plain = (
        max(one[key] for one in floors[name])
        for name, key in (("kernel", "ms"), ("kernel", "unsummed_ms"), ("kernel", "checksum_ms"), ("plain_copies", "ms"))
    )
    sync = statistics.median(one["sync_ms"] for one in rounds)
    lines = [
        f"{case['model']}, {case['num_ranks']} trainer ranks -> {case['num_engines']} x TP {case['tp_size']}, {len(rounds)} rounds",
        f"  sync      {spread([one['sync_ms'] for one in rounds])}; first {case['first']['sync_ms']:.0f} ms",
        f"  floor     {floor_ms(case):.2f} ms ({100 * floor_ms(case) / sync:.0f} %), "
        f"{rounds[0]['copied_bytes'] / case['tp_size'] / case['num_engines'] / sync / 1e6:.0f} GB/s a rank",
        f"  verified  {spread([one['verified_ms'] for one in rounds])}",
        f"  publish   {spread([one['publish_ms'] for one in rounds])}; first {case['first']['publish_ms']:.0f} ms",
        *(f"  part {name}: {spread([one['parts_ms'][name] for one in rounds])}" for name in rounds[0]["parts_ms"]),
        f"  compare   {spread([one['compare_ms'] for one in rounds])}",
        f"  kernel alone {kernel:.2f} ms, without sums {unsummed:.2f} ms, reading back {checksum:.2f} ms, "
        f"plain copies {plain:.2f} ms",
        f"  rates     {[round(one['gb_s']) for one in floors['within']]} GB/s within, "
        f"{[round(one['gb_s']) for one in floors.get('across', [])]} GB/s across",
        f"  memory    extra {max(one['extra_mib'] for one in rounds):.1f} MiB, lost {max(one['lost_mib'] for one in rounds):.1f} MiB; "
        f"first {case['first']['extra_mib']:.1f} and {case['first']['lost_mib']:.1f} MiB; arena {case['first']['arena_mib']:.0f} MiB; "
        f"CPU {statistics.median(one['cpu_ms'] for one in rounds):.1f} ms",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--cases", nargs="+", type=Case.of, default=[Case.of("7b:1:1")], metavar=METAVAR)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs/bench")
    parser.add_argument("--trainer", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer:
        rank, num_ranks, model, folder = args.trainer
        return trainer_rank(int(rank), int(num_ranks), model, Path(folder))
    if args.engine:
        rank, tp_size, model = args.engine
        return engine_rank(int(rank), int(tp_size), model)
    require_gpus(max(case.num_gpus for case in args.cases))
    cases: list[dict[str, Any]] = []
    for case in args.cases:
        cases.append(run_case(case))
        print(table(cases[-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "sync_gpu.json").write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "cases": cases}, indent=1))
    return None


if __name__ == "__main__":
    main()
