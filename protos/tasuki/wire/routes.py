"""Experts of each token in streams of samples: a field that does not fit its message travels before it, in parts."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from tasuki.v1.trainer_pb2 import TokenLogProbs
from tasuki.v1.types_pb2 import Sample, TrainingSample
from tasuki.wire.channel import MAX_CHUNK_BYTES

_Entry = TypeVar("_Entry", Sample, TrainingSample, TokenLogProbs)
_PART_BYTES = MAX_CHUNK_BYTES // 2
_PART_FIELDS = {"prompt_index", "sample_index", "routed_experts"}


def in_parts(samples: Iterable[_Entry]) -> Iterator[_Entry]:
    """Yields the samples, each after the parts of experts that would not fit a chunk with it."""
    for sample in samples:
        if not sample.routed_experts or sample.ByteSize() <= MAX_CHUNK_BYTES:
            yield sample
            continue
        for start in range(0, len(sample.routed_experts), _PART_BYTES):
            part = type(sample)(routed_experts=sample.routed_experts[start : start + _PART_BYTES])
            if isinstance(part, Sample) and isinstance(sample, Sample):
                part.prompt_index, part.sample_index = sample.prompt_index, sample.sample_index
            yield part
        rest = type(sample)()
        rest.CopyFrom(sample)
        rest.ClearField("routed_experts")
        yield rest


def is_part(entry: Sample | TrainingSample | TokenLogProbs) -> bool:
    """Whether the entry only has a part of the experts of a later one."""
    return bool(entry.routed_experts) and {field.name for field, _ in entry.ListFields()} <= _PART_FIELDS


class Whole:
    """Reads a stream of `in_parts`. Parts of several samples may be mixed, as a fleet's nodes send them."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], bytes] = {}

    def samples(self, entries: Iterable[_Entry]) -> Iterator[_Entry]:
        """Yields the whole samples among further entries."""
        for entry in entries:
            key = (entry.prompt_index, entry.sample_index) if isinstance(entry, Sample) else (0, 0)
            if is_part(entry):
                self._parts[key] = self._parts.get(key, b"") + entry.routed_experts
                continue
            if before := self._parts.pop(key, b""):
                entry.routed_experts = before + entry.routed_experts
            yield entry
