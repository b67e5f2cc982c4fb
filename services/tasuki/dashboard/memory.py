"""Memory of each device by tag over time: the services' reports, advanced by the journal's stages, next to the plan."""

from __future__ import annotations

import json
import math
import threading
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from tasuki.config.choices import read_choices
from tasuki.config.load import load_config
from tasuki.coordinator.headroom import after
from tasuki.coordinator.observe.memory_record import read_usages
from tasuki.coordinator.phases import phase_of
from tasuki.coordinator.planning import PART_TAGS, plan_to_proto
from tasuki.dashboard.journal import STAGES, StageColumns, stage_number
from tasuki.memory.host import host_memory
from tasuki.planner.advice import advise
from tasuki.planner.choose import plan_node
from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.wire.errors import TasukiError
from tasuki.wire.regular_file import open_regular, unreadable
from tasuki.wire.stages import RING, RULES, MemoryTag, Service, Stage

_RECORD_BYTES = 16_000_000
_LINE_BYTES = 1 << 18
_NUM_LINES, _NUM_TAGS, _NUM_DEVICES = 10_000, 50_000, 64
"""Limits on the newest reports, and on the tags of all of them together and the devices of each."""
_MAX_BYTES = 2**53
_MAX_POINTS = 2_000
_NO_GPU = 1
"""Unused on a CPU, but the planner requires a GPU size."""
_CPU, _HOST = "cpu", "host"

Sizes = Mapping[tuple[str, str, str], int]
"""Mapped bytes by service, tag and device."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A report of the services, and the sizes that stages lead to from there. sizes: by place in STAGES."""

    time: float
    sizes: tuple[Sizes, ...]
    device_bytes: Mapping[str, int]
    process_bytes: Mapping[str, int]
    num_tags: int


class MemoryTimeline:
    """Rereads memory.jsonl when it changes."""

    def __init__(self, record: Path) -> None:
        self._record = record
        self._lock = threading.Lock()
        self.problem = ""
        self._stamp: tuple[int, int] | None = None
        self._known: list[_Known] = []

    def device_bytes(self) -> dict[str, int]:
        """Memory of each device reported by the services."""
        return {device: size for known in self._read() for device, size in known.device_bytes.items()}

    def window(self, columns: StageColumns, *, changeovers: int, plan: Mapping[str, Any] | None) -> dict[str, Any]:
        """The last `changeovers` of the journal, in at most 2,000 points; `columns` are the journal's stages."""
        known = self._read()
        first = bisect_left(columns.numbers, (columns.numbers[-1] if columns.numbers else 0) - changeovers + 1)
        size = max(1, math.ceil((len(columns.times) - first) / _MAX_POINTS))
        at, points = 0, []
        for index in range(first, len(columns.times), size):
            now = bisect_right([one.time for one in known], columns.times[index]) - 1
            if now < 0:
                continue
            at = _place(columns, index)
            points.append((columns.times[index], at, known[now].sizes[at]))
        return {
            "devices": [_device(name, points, known[-1]) for name in _devices(points)],
            "times": [time for time, _, _ in points],
            "stages": [STAGES[at] for _, at, _ in points],
            "bucket": size,
            "plan": None if plan is None else _planned(plan, [at for _, at, _ in points], is_cpu=_devices(points) == [_CPU]),
        }

    def _read(self) -> list[_Known]:
        with self._lock:
            try:
                status = self._record.stat()
                if (stamp := (status.st_ino, status.st_size)) != self._stamp:
                    with open_regular(self._record) as file:
                        lines = deque(file.read(_RECORD_BYTES).split(b"\n"), _NUM_LINES)
                    self._known = sorted(_newest(lines), key=lambda known: known.time)
                    self._stamp = stamp
                self.problem = ""
            except OSError as error:
                self._stamp, self._known, self.problem = None, [], unreadable(self._record, error)
            return self._known


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
    return MessageToDict(plan_to_proto(planned, advise(planned)), preserving_proto_field_name=True)


def _newest(lines: Sequence[bytes]) -> Iterator[_Known]:
    num_tags = 0
    for line in reversed(lines):
        if (known := _known(line)) is not None:
            num_tags += known.num_tags
            if num_tags > _NUM_TAGS:
                return
            yield known


def _known(line: bytes) -> _Known | None:
    """Returns None for a truncated or foreign line."""
    if len(line) > _LINE_BYTES:
        return None
    try:
        fields = json.loads(line)
        usages, time = read_usages(fields), float(fields["time"])
        totals = {str(device): int(size) for device, size in fields["device_bytes"].items()}
        processes = {str(device): int(size) for device, size in fields.get("process_bytes", {}).items()}
        tags = [tag for usage in usages.values() for tag in usage.tags]
        sizes = [*totals.values(), *processes.values(), *(size for tag in tags for size in (tag.mapped_bytes, tag.total_bytes))]
        if not math.isfinite(time) or not all(0 <= size <= _MAX_BYTES for size in sizes):
            return None
        if len({*totals, *(tag.device for tag in tags)}) > _NUM_DEVICES:
            return None
        return _Known(time, _sizes_by_place(usages), totals, processes, len(tags))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _sizes_by_place(usages: dict[Service, GetUsageResponse]) -> tuple[Sizes, ...]:
    """Goes around the ring twice: at the start of a lap, some tags are still as reported."""
    sizes: dict[Stage, Sizes] = {}
    for rule in (*RING, *RING):
        usages = {**usages, rule.service: after(rule.stage, usages[rule.service])}
        sizes[rule.stage] = _sums(usages)
    return tuple(sizes[stage] for stage in STAGES)


def _sums(usages: Mapping[Service, GetUsageResponse]) -> Sizes:
    sizes: dict[tuple[str, str, str], int] = {}
    for service, usage in usages.items():
        for tag in usage.tags:
            key = (str(service), str(MemoryTag.of(tag.tag)), tag.device)
            sizes[key] = sizes.get(key, 0) + tag.mapped_bytes
    return sizes


def _place(columns: StageColumns, index: int) -> int:
    """The node's place after a stage: a stage that failed or was undone leads to the place before it."""
    stage = columns.stages[index]
    if columns.is_done[index] and not columns.is_undo[index]:
        return stage
    return stage_number(RULES[STAGES[stage]].after)


def _devices(points: Sequence[tuple[float, int, Sizes]]) -> list[str]:
    names = {device for _, _, sizes in points for _, _, device in sizes}
    return sorted(names, key=lambda name: (len(name), name))


def _device(name: str, points: Sequence[tuple[float, int, Sizes]], newest: _Known) -> dict[str, Any]:
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


def _planned(plan: Mapping[str, Any], places: Sequence[int], *, is_cpu: bool) -> dict[str, Any]:
    """Planned bytes of tags and in total, by device and point. A phase counts at its peak."""
    stages = {stage["stage"]: stage for stage in plan.get("stages", ())}
    devices: dict[str, list[tuple[int, int]]] = {}
    by_place: dict[int, dict[str, tuple[int, int]]] = {}
    for place in set(places):
        stage = stages.get(str(phase_of(STAGES[place]) or STAGES[place]), {})
        by_place[place] = {_name(device["device"], is_cpu=is_cpu): _of_device(device) for device in stage.get("devices", ())}
    for name in {name for of_place in by_place.values() for name in of_place}:
        devices[name] = [by_place[place].get(name, (0, 0)) for place in places]
    return {
        name: {"tags": [tags for tags, _ in values], "total": [total for _, total in values]}
        for name, values in devices.items()
    }


def _name(device: str, *, is_cpu: bool) -> str:
    return _CPU if is_cpu and device == _HOST else device


def _of_device(device: Mapping[str, Any]) -> tuple[int, int]:
    """MessageToDict returns 64-bit numbers as strings."""
    tags = sum(int(part["bytes"]) for part in device.get("parts", ()) if part["part"] in PART_TAGS)
    return tags, int(device.get("needed_bytes", 0))
