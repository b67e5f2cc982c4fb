"""memory.jsonl in a node's folder: usage of the services' tags, whenever it changed.

With the times of stages in the journal, it gives the memory of each device at every moment of the node's life.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasuki.v1.memory_pb2 import GetUsageResponse
from tasuki.v1.types_pb2 import DeviceUsage, TagUsage
from tasuki.wire.stages import RING, MemoryTag, Service, Stage

_log = logging.getLogger("tasuki.coordinator")
_MAX_BYTES = 16_000_000
"""Size limit of a file; a line has about 200 bytes for each tag of a GPU."""

TAKES = {rule.stage: rule.resumes for rule in RING if rule.resumes}
"""Tags that a stage wakes."""
_GIVES = {rule.stage: rule.pauses for rule in RING if rule.pauses}
_FIELDS = ("device", "mapped_bytes", "total_bytes", "stays")
Usages = Mapping[Service, GetUsageResponse]


class MemoryRecord:
    """Appends a line if sizes of tags changed, or other tags are mapped than the stages explain. A full disk costs a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: set[str] = set()

    def note(self, usages: Usages) -> None:
        """usages: of both services, as just reported, or as estimated since."""
        tags = _listed(usages)
        if json.dumps(tags) in self._known:
            return
        # All states of the tags over the positions in the ring, if only stages move them.
        self._known, now = {json.dumps(tags)}, dict(usages)
        for rule in (*RING, *RING):
            now[rule.service] = after(rule.stage, now[rule.service])
            self._known.add(json.dumps(_listed(now)))
        devices = [one for usage in usages.values() for one in usage.devices]
        processes = Counter[str]()
        for one in devices:
            processes[one.device] += one.process_bytes
        totals = {one.device: one.total_bytes for one in devices}
        line = json.dumps({"time": time.time(), "tags": tags, "device_bytes": totals, "process_bytes": processes}) + "\n"
        try:
            with self._path.open("a") as lines:
                if lines.tell() + len(line) <= _MAX_BYTES:
                    lines.write(line)
        except OSError as error:
            _log.warning("event=memory_not_recorded path=%s error=%s", self._path, error)


def after(stage: Stage, usage: GetUsageResponse) -> GetUsageResponse:
    """The same usage once `stage` is done."""
    then = GetUsageResponse()
    then.CopyFrom(usage)
    for one in tags_of(stage, then, TAKES):
        one.mapped_bytes, one.kept_bytes, one.is_paused = one.total_bytes, 0, False
    for one in tags_of(stage, then, _GIVES):
        if not one.stays:
            one.mapped_bytes, one.is_paused = 0, True
    return then


def tags_of(stage: Stage, usage: GetUsageResponse, moved: Mapping[Stage, Sequence[MemoryTag]]) -> list[TagUsage]:
    """The service's tags that `stage` moves. moved: tags by stage."""
    return [one for one in usage.tags if MemoryTag.of(one.tag) in moved.get(stage, ())]


def read_usages(line: Mapping[str, Any]) -> dict[Service, GetUsageResponse]:
    """Usages that `note` wrote. Raises KeyError, TypeError or ValueError for any other line."""
    devices = [DeviceUsage(device=name, total_bytes=int(size)) for name, size in line["device_bytes"].items()]
    return {
        service: GetUsageResponse(tags=[_tag(one) for one in line["tags"] if one["service"] == service], devices=devices)
        for service in Service
    }


def _listed(usages: Usages) -> list[dict[str, Any]]:
    return [
        {"service": service, "tag": MemoryTag.of(tag.tag), **{name: getattr(tag, name) for name in _FIELDS}}
        for service in Service
        for tag in usages[service].tags
    ]


def _tag(fields: Mapping[str, Any]) -> TagUsage:
    usage = TagUsage(tag=MemoryTag(fields["tag"]).number, device=str(fields["device"]), stays=bool(fields["stays"]))
    usage.mapped_bytes, usage.total_bytes = int(fields["mapped_bytes"]), int(fields["total_bytes"])
    usage.is_paused = usage.mapped_bytes < usage.total_bytes
    return usage
