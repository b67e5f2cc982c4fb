"""Memory of each device by tag over time: the services' reports, advanced by the journal's stages, next to the plan."""

import json
import math
import sqlite3
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasuki.config.choices import read_choices
from tasuki.config.load import load_config
from tasuki.coordinator.memory_record import after, read_usages
from tasuki.coordinator.phases import phase_of
from tasuki.coordinator.planning import PART_TAGS, plan_table
from tasuki.dashboard.places import MALFORMED, Followed
from tasuki.memory.host import host_memory
from tasuki.planner.advice import advise
from tasuki.planner.choose import plan_node
from tasuki.wire.errors import TasukiError
from tasuki.wire.regular_file import open_regular
from tasuki.wire.stages import RING, RULES, MemoryTag, Stage

_RECORD_BYTES, _NUM_LINES = 16_000_000, 10_000
_MAX_POINTS = 2_000
_NO_GPU = 1
"""Unused on a CPU, but the planner requires a GPU size."""
_CPU, _HOST = "cpu", "host"
_STAGES = frozenset(Stage)

Sizes = Mapping[tuple[str, str, str], int]
"""Mapped bytes by service, tag and device."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A report of the services, and the sizes that stages lead to from there."""

    time: float
    sizes: Mapping[Stage, Sizes]
    device_bytes: Mapping[str, int]
    process_bytes: Mapping[str, int]


class MemoryTimeline(Followed):
    """Rereads memory.jsonl when it changes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._stamp: tuple[int, int] | None = None
        self._known: list[_Known] = []

    def read_on(self) -> bool:
        status = self.path.stat()
        if (stamp := (status.st_ino, status.st_size)) == self._stamp:
            return False
        with open_regular(self.path) as file:
            lines = deque(file.read(_RECORD_BYTES).split(b"\n"), _NUM_LINES)
        self._known = sorted(filter(None, map(_known, lines)), key=lambda known: known.time)
        self._stamp = stamp
        return True

    def device_bytes(self) -> dict[str, int]:
        """Memory of each device reported by the services."""
        return {device: size for known in self._known for device, size in known.device_bytes.items()}

    def window(self, stages: Sequence[sqlite3.Row], *, plan: Mapping[str, Any] | None) -> dict[str, Any]:
        """Memory after these stages of the journal, in at most 2,000 points."""
        known, times = self._known, [one.time for one in self._known]
        size = max(1, math.ceil(len(stages) / _MAX_POINTS))
        points: list[tuple[float, Stage, Sizes]] = []
        for row in stages[::size]:
            now = bisect_right(times, row["time"]) - 1
            if now >= 0 and row["stage"] in _STAGES:
                # After a failure or an undo the node is where it was before the stage.
                at = Stage(row["stage"]) if row["is_done"] else RULES[Stage(row["stage"])].after
                points.append((row["time"], at, known[now].sizes[at]))
        names = {device for _, _, sizes in points for _, _, device in sizes}
        devices = sorted(names, key=lambda name: (len(name), name))
        return {
            "devices": [_device(name, points, known[-1]) for name in devices],
            "times": [time for time, _, _ in points],
            "stages": [at for _, at, _ in points],
            "bucket": size,
            "plan": None if plan is None else _planned(plan, [at for _, at, _ in points], is_cpu=devices == [_CPU]),
        }


def read_plan(config_path: Path, device_bytes: Mapping[str, int]) -> dict[str, Any]:
    """The plan of a node's configuration, as returned by the RPC Plan. Raises TasukiError and OSError."""
    config = load_config(config_path)
    gpus = [size for device, size in device_bytes.items() if device != _CPU]
    if config.device != _CPU and not gpus:
        raise TasukiError("the size of the GPUs is known once the node has changed its phase")
    planned = plan_node(
        config,
        gpu_bytes=min(gpus, default=_NO_GPU),
        host_bytes=device_bytes.get(_CPU) or host_memory().total_bytes,
        choices=read_choices(config_path.parent),
    )
    return plan_table(planned, advise(planned))


def _known(line: bytes) -> _Known | None:
    """Returns None for a truncated or foreign line."""
    try:
        fields = json.loads(line)
        usages, sizes = read_usages(fields), dict[Stage, Sizes]()
        # Twice around the ring: at the start of a lap, some tags are still as reported.
        for rule in (*RING, *RING):
            usages[rule.service] = after(rule.stage, usages[rule.service])
            mapped = Counter[tuple[str, str, str]]()
            for service, usage in usages.items():
                for tag in usage.tags:
                    mapped[str(service), str(MemoryTag.of(tag.tag)), tag.device] += tag.mapped_bytes
            sizes[rule.stage] = mapped
        return _Known(float(fields["time"]), sizes, fields["device_bytes"], fields.get("process_bytes", {}))
    except MALFORMED:
        return None


def _device(name: str, points: Sequence[tuple[float, Stage, Sizes]], newest: _Known) -> dict[str, Any]:
    keys = list(dict.fromkeys(key for _, _, sizes in points for key in sizes if key[2] == name))
    return {
        "device": name,
        "total_bytes": newest.device_bytes.get(name),
        "process_bytes": newest.process_bytes.get(name),
        "series": [
            {"service": service, "tag": tag, "bytes": [sizes.get((service, tag, name), 0) for _, _, sizes in points]}
            for service, tag, _ in keys
        ],
    }


def _planned(plan: Mapping[str, Any], places: Sequence[Stage], *, is_cpu: bool) -> dict[str, Any]:
    """Planned bytes of tags and in total, by device and point. A phase counts at its peak."""
    stages = {stage["stage"]: stage for stage in plan["stages"]}
    by_place: dict[Stage, dict[str, tuple[int, int]]] = {}
    for place in set(places):
        stage = stages.get(str(phase_of(place) or place), {})
        by_place[place] = {
            _CPU if is_cpu and device["device"] == _HOST else device["device"]: (
                sum(part["bytes"] for part in device["parts"] if part["part"] in PART_TAGS),
                device["needed_bytes"],
            )
            for device in stage.get("devices", ())
        }
    found: dict[str, dict[str, list[int]]] = {}
    for name in {name for of_place in by_place.values() for name in of_place}:
        sizes = [by_place[place].get(name, (0, 0)) for place in places]
        found[name] = {"tags": [tags for tags, _ in sizes], "total": [total for _, total in sizes]}
    return found
