"""Parts of a first sync on an engine rank, timed on a CPU: `python -m tools.bench.first_sync [--cases 7b:4:2 32b:2:2] [--rounds 9]`.

A case is model : trainer ranks : tensor-parallel ranks. Trainer ranks publish rows, as FSDP2 shards them. Weights have addresses but no
memory, and nothing is copied: it times how a loader is recorded, and how the plan is lowered to the tables of a GPU's kernels. Mapping and
transfers to a GPU are left out; the loader is a short one that slices as SGLang's do. Prints medians, in ms.
"""

from __future__ import annotations

import argparse
import gc
import math
import mmap
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tasuki.rollout import receive, recorded_plan
from tasuki.rollout.receive import _PreparedPlan
from tasuki.rollout.record import complete_plan, record
from tasuki.rollout.recorded_plan import RecordedPlan
from tasuki.weights import copies, plan, split, table
from tasuki.weights.imported_weights import ImportedWeights
from tasuki.weights.manifest import Entry, entries_by_name, lay_out
from tests.slices import by_rows
from tools.bench.cases import METAVAR, Case
from tools.bench.sync_shapes import QWEN, QwenModel, QwenShape

_CPU = torch.device("cpu")
_RESERVED_BYTES = 160 << 30
_MAP_NORESERVE = 0x4000  # mmap has a name for it from Python 3.13 on


class Addresses(TorchFunctionMode):
    """Gives `torch.full` addresses without memory."""

    def __init__(self) -> None:
        super().__init__()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._bytes = torch.frombuffer(mmap.mmap(-1, _RESERVED_BYTES, flags=flags), dtype=torch.uint8)
        self._num_taken = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        start, self._num_taken = self._num_taken, self._num_taken + -(-num_bytes // 512) * 512
        return self._bytes[start : start + num_bytes].view(dtype).view(shape)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.take(args[0], kwargs["dtype"]) if func is torch.full else func(*args, **(kwargs or {}))


class Published(ImportedWeights):
    """Published weights of a trainer, without memory."""

    def __init__(self, shape: QwenShape, *, num_ranks: int, addresses: Addresses) -> None:
        manifests = [lay_out(_entries(shape, rank, num_ranks), rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
        self._arenas = []
        self.entries = entries_by_name(manifests)
        self._tensors = {
            (entry.name, entry.offsets): (addresses.take(entry.sizes, torch.bfloat16), manifest.rank)
            for manifest in manifests
            for entry in manifest.entries
        }


def _entries(shape: QwenShape, rank: int, num_ranks: int) -> list[Entry]:
    boxes = ((name, whole, by_rows(whole, rank, num_ranks)) for name, whole in shape.checkpoint().items())
    return [Entry(name, "bfloat16", whole, box.offsets, box.sizes) for name, whole, box in boxes if box.numel]


class Parts:
    """Milliseconds by part, one of each round."""

    def __init__(self) -> None:
        self.ms: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.ms[part].append(1e3 * (time.perf_counter() - start))


def run_case(case: Case, *, num_rounds: int) -> Parts:
    addresses, parts = Addresses(), Parts()
    with addresses:
        model = QwenModel(QWEN[case.model], tp_rank=0, tp_size=case.tp_size, dtype=torch.bfloat16, device=_CPU)
    published = Published(QWEN[case.model], num_ranks=case.num_ranks, addresses=addresses)
    gc.collect()
    gc.freeze()  # as at an engine's start

    def lowered(views: Any, **_: object) -> Any:
        with parts.timed("sync: tables"):
            return copies.summed_copy_tables(views, device=_CPU, first_owner=0)

    recorded_plan.prepare_checksums = lambda views, device: copies.checksum_tables(views, device=device)
    receive.prepare_summed_copies = lowered
    layout = published.layout()
    for _ in range(num_rounds):
        for cached in (table._lowered, split._split, plan._count_uncovered):
            cached.cache_clear()
        with parts.timed("ahead: recording"):
            record(model, layout)
        with parts.timed("ahead: all"):
            recorded = RecordedPlan(model, layout)
        with parts.timed("sync: all"):
            with parts.timed("sync: checks"):
                assert recorded.applies_to(published.layout())
                checked = complete_plan(recorded.recording, model, published)
            _PreparedPlan(checked, recorded, published)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", type=Case.of, default=[Case.of("7b:4:2"), Case.of("32b:2:2")], metavar=METAVAR)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for case in arguments.cases:
        parts = run_case(case, num_rounds=arguments.rounds)
        print(
            f"{case.model}:{case.num_ranks}:{case.tp_size}",
            *(f"  {part:20}{statistics.median(ms):8.1f}" for part, ms in parts.ms.items()),
            sep="\n",
        )


if __name__ == "__main__":
    main()
