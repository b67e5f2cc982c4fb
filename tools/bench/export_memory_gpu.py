"""Cost of publishing parameters or a copy, of releasing either and of mapping it again: `python -m tools.bench.export_memory_gpu`.

One GPU, shapes of Qwen2.5-7B in bfloat16. The trainer and one engine rank, without an engine, share this process, which maps its own memory
as another process would. Figures are medians in milliseconds over the 10 rounds after the first, from an idle device to an idle device.
"release": the reader unmaps after reading. "renew": it maps again at the next sync. "leave" and "return": the trainer unmaps and maps
again, including the copy of the weights to and from pinned memory if they are offloaded.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch

from tasuki.memory.arena import Keep, NativeAllocator
from tasuki.rollout.receive import WeightReceiver
from tasuki.v1 import weights_pb2
from tasuki.weights.export import ExportMemory, WeightExport
from tasuki.weights.imported_weights import ImportedWeights
from tasuki.wire.stages import MemoryTag
from tools.bench.gpus import require_gpus
from tools.bench.sync_shapes import QWEN, QwenModel, random_shards

NUM_ROUNDS = 11
GPU = torch.device("cuda:0")
CASES = {
    "copy stays": (False, False),
    "copy leaves": (False, True),
    "parameters stay": (True, False),
    "parameters leave": (True, True),
}


def run_case(model: str, folder: Path, *, in_place: bool, leaves: bool) -> dict[str, float]:
    keep = Keep.CHUNKS if in_place and not leaves else Keep.CONTENT
    allocator = NativeAllocator(tags=[MemoryTag.WEIGHTS], device="cuda:0", keep={MemoryTag.WEIGHTS: keep})
    with allocator.region(MemoryTag.WEIGHTS):
        shards = random_shards(QWEN[model], rank=0, num_ranks=1, dtype=torch.bfloat16, device=GPU)
    memory = ExportMemory(allocator.arena(MemoryTag.WEIGHTS) if in_place else None, leaves=leaves)
    export = WeightExport(shards, rank=0, num_ranks=1, dtype=torch.bfloat16, socket_path=folder / "w.sock", memory=memory)
    if export.copies is not None:
        allocator.adopt(MemoryTag.EXPORT, export.copies)
    parameters = QwenModel(QWEN[model], tp_rank=0, tp_size=1, dtype=torch.bfloat16, device=GPU)
    receiver = WeightReceiver(parameters)
    took: defaultdict[str, list[float]] = defaultdict(list)
    for version in range(NUM_ROUNDS):
        _round(version, allocator=allocator, export=export, receiver=receiver, leaves=leaves, took=took)
    return {name: statistics.median(values[1:]) for name, values in took.items()}


def _round(
    version: int,
    *,
    allocator: NativeAllocator,
    export: WeightExport,
    receiver: WeightReceiver,
    leaves: bool,
    took: dict[str, list[float]],
) -> None:
    def timed(name: str, call: Callable[[], object]) -> None:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took[name].append(1e3 * (time.perf_counter() - start))

    def leave() -> None:
        if not leaves:
            allocator.pause([MemoryTag.WEIGHTS])
            return
        with export.released():
            allocator.pause(allocator.tags)

    copies = [tag for tag in allocator.tags if tag is MemoryTag.EXPORT]
    timed("take the copy's memory", lambda: allocator.resume(copies))
    timed("publish", lambda: export.publish(version))
    weights = weights_pb2.PublishedWeights(policy_version=version, boot_id="boot", handles=[export.handle()])
    seconds: dict[str, float] = {}
    timed("sync", lambda: seconds.update(receiver.receive(weights, import_timeout_s=10).timings))
    took["renew"].append(1e3 * seconds["import"])
    imported = receiver._imported
    assert isinstance(imported, ImportedWeights)
    imported.renew(weights, timeout_s=10)
    timed("release", imported.release)
    before = torch.cuda.mem_get_info()[0]
    timed("leave", leave)
    took["freed GiB"].append((torch.cuda.mem_get_info()[0] - before) / 2**30)
    timed("return", lambda: allocator.resume([MemoryTag.WEIGHTS]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(QWEN), default="7b")
    parser.add_argument("--case", choices=list(CASES), help="only this one, in this process, as a line of JSON")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    require_gpus()
    if arguments.case is not None:
        in_place, leaves = CASES[arguments.case]
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_case(arguments.model, Path(folder), in_place=in_place, leaves=leaves)))
        return
    results: dict[str, dict[str, float]] = {}
    for case in CASES:
        command = [sys.executable, "-m", "tools.bench.export_memory_gpu", "--model", arguments.model, "--case", case]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        results[case] = json.loads(lines.splitlines()[-1])
        print(case, {name: round(value, 2) for name, value in results[case].items()}, flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "export_memory_gpu.json").write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
