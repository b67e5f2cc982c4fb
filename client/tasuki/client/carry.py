"""Groups that outlive a changeover: a step takes the first complete ones; the others are cut, and continued after it from their tokens.

A token keeps the version and the log-prob with which it was drawn. G: samples of a group.
"""

from __future__ import annotations

import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tasuki.client import encode
from tasuki.client.dataset import Row
from tasuki.client.generation import Part
from tasuki.client.sync_client import Client
from tasuki.client.types import FinishReason, Sample, SamplingParams, VersionSpan
from tasuki.v1 import types_pb2
from tasuki.wire.errors import InvalidArgument, PeerUnavailable

_MAX_LOSSES = 4
"""Generations in a row that may end without a sample."""


@dataclass(slots=True, eq=False)
class CarriedGroup:
    """A row, and the samples drawn for it so far."""

    id: int
    """Unique in the run; its calls' seeds follow from it."""
    row: Row
    prompt_token_ids: Sequence[int]
    samples: list[Sample]
    """[G]; cut ones are unfinished, and have no tokens before they begin."""

    @classmethod
    def begin(cls, id: int, row: Row, prompt_token_ids: Sequence[int], *, group_size: int) -> CarriedGroup:  # noqa: A002
        """A group without tokens."""
        prompt, none = np.array(prompt_token_ids, np.int32), np.zeros(0, np.int32)
        samples = [
            Sample(0, number, none, none.astype(np.float32), FinishReason.CUT, 0, prompt_token_ids=prompt)
            for number in range(group_size)
        ]
        return cls(id, row, prompt_token_ids, samples)

    @property
    def is_complete(self) -> bool:
        return not any(sample.finish_reason is FinishReason.CUT for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)

    def oldest_version(self, newest: int) -> int:
        """Version of its oldest token; `newest` without any."""
        return min((span.policy_version for sample in self.samples for span in spans_of(sample)), default=newest)

    def as_json(self) -> dict[str, Any]:
        samples = [b64encode(encode.sample_to_proto(sample).SerializeToString()).decode() for sample in self.samples]
        return {"id": self.id, "row": self.row, "prompt_token_ids": list(map(int, self.prompt_token_ids)), "samples": samples}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> CarriedGroup:
        """Inverse of `as_json`. Raises InvalidArgument if the record is damaged."""
        try:
            prompt = np.array(fields["prompt_token_ids"], np.int32)
            samples = [types_pb2.Sample.FromString(b64decode(sample)) for sample in fields["samples"]]
            made = [encode.sample_from_proto(one, prompt_index=0, prompt_token_ids=prompt) for one in samples]
            return cls(int(fields["id"]), dict(fields["row"]), prompt.tolist(), made)
        except (KeyError, TypeError, ValueError, DecodeError) as error:
            text = f"a carried group is damaged ({type(error).__name__}: {error}); resume from an earlier checkpoint"
            raise InvalidArgument("output_dir", text) from error


def spans_of(sample: Sample) -> Sequence[VersionSpan]:
    """The versions of its tokens; empty without tokens."""
    if sample.version_spans or not len(sample.token_ids):
        return sample.version_spans
    return [VersionSpan(num_tokens=len(sample.token_ids), policy_version=sample.policy_version)]


def merged(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """Spans of which neighbours have different versions."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and found[-1].policy_version == span.policy_version:
            num_tokens = found.pop().num_tokens + span.num_tokens
            span = VersionSpan(num_tokens=num_tokens, policy_version=span.policy_version)
        found.append(span)
    return found


def continued(before: Sample, after: Sample, *, max_new_tokens: int) -> Sample:
    """`before` with the tokens that `after` has drawn from its prompt and tokens."""
    token_ids = np.concatenate([before.token_ids, after.token_ids])
    spans = merged([*spans_of(before), *spans_of(after)])
    is_full = after.finish_reason is FinishReason.CUT and len(token_ids) >= max_new_tokens
    return replace(
        after,
        prompt_index=before.prompt_index,
        sample_index=before.sample_index,
        token_ids=token_ids,
        rollout_log_probs=np.concatenate([before.rollout_log_probs, after.rollout_log_probs]),
        finish_reason=FinishReason.LENGTH if is_full else after.finish_reason,
        policy_version=spans[-1].policy_version if spans else after.policy_version,
        has_exact_log_probs=before.has_exact_log_probs and after.has_exact_log_probs,
        prompt_token_ids=before.prompt_token_ids,
        version_spans=spans if len(spans) > 1 else (),
    )


def staleness(samples: Sequence[Sample], *, policy_version: int) -> dict[str, float]:
    """Metrics of the samples' tokens: versions by which they are older than `policy_version`, and how many are."""
    spans = [span for sample in samples for span in spans_of(sample)]
    ages = [policy_version - span.policy_version for span in spans]
    lengths = [span.num_tokens for span in spans]
    return {
        "staleness": float(np.average(ages, weights=lengths)) if spans else 0.0,
        "staleness_max": float(max(ages, default=0)),
        "carried_tokens": float(sum(length for age, length in zip(ages, lengths, strict=True) if age)),
    }


@dataclass(slots=True)
class Carry:
    """The groups of a run that no step has trained on."""

    groups: list[CarriedGroup] = field(default_factory=list)

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]]) -> Carry:
        """Inverse of `records`."""
        return cls([CarriedGroup.of(record) for record in records])

    def records(self) -> list[dict[str, Any]]:
        """The groups as JSON, for the loop's state."""
        return [group.as_json() for group in self.groups]

    def drop_stale(self, *, oldest: int) -> dict[str, float]:
        """Drops the samples of groups with a token of a version before `oldest`, whose rows are then generated again."""
        stale = [group for group in self.groups if group.oldest_version(oldest) < oldest]
        metrics = {"dropped_groups": float(len(stale)), "dropped_tokens": float(sum(group.num_tokens for group in stale))}
        for group in stale:
            group.samples = CarriedGroup.begin(0, {}, group.prompt_token_ids, group_size=len(group.samples)).samples
        return metrics

    def take(
        self,
        client: Client,
        sampling: SamplingParams,
        *,
        num_groups: int,
        call_number: int,
        on_progress: Callable[[int, int], None],
    ) -> list[CarriedGroup]:
        """Generates until `num_groups` are complete, cuts the others, and returns the first complete ones, ordered by id.

        Phase TRAIN has then begun, unless so many were complete before.
        """
        complete = [group for group in self.groups if group.is_complete]
        parts, targets = list[Part](), list[tuple[CarriedGroup, int | None]]()
        assert sampling.max_new_tokens is not None
        max_new_tokens = sampling.max_new_tokens

        def add(sample: Sample) -> bool:
            group, number = targets[sample.prompt_index]
            number = sample.sample_index if number is None else number
            group.samples[number] = continued(group.samples[number], sample, max_new_tokens=max_new_tokens)
            if group.is_complete:
                complete.append(group)
            return len(complete) >= num_groups

        num_losses = 0
        while len(complete) < num_groups:
            parts, targets = _parts(self.groups, sampling, max_new_tokens=max_new_tokens, call_number=call_number)
            samples = client.generate_until(parts, add, on_progress=on_progress)
            num_losses = 0 if samples else num_losses + 1
            if num_losses > _MAX_LOSSES:
                raise PeerUnavailable(f"rollout was lost {num_losses} times before a sample was complete", peer="rollout")
        taken = sorted(complete[:num_groups], key=lambda group: group.id)
        self.groups = [group for group in self.groups if group not in taken]
        return taken


def _parts(
    groups: Sequence[CarriedGroup], sampling: SamplingParams, *, max_new_tokens: int, call_number: int
) -> tuple[list[Part], list[tuple[CarriedGroup, int | None]]]:
    """The calls that complete the groups, oldest first, and for each its group and sample; None for a group that has not begun."""
    parts, targets = list[Part](), list[tuple[CarriedGroup, int | None]]()
    for group in groups:
        unfinished = [sample for sample in group.samples if sample.finish_reason is FinishReason.CUT]
        if unfinished and not group.num_tokens:
            number = _call_number(call_number, group.id, 0)
            parts.append(Part(group.prompt_token_ids, sampling, len(group.samples), number))
            targets.append((group, None))
            continue
        for sample in unfinished:
            prompt = np.concatenate([np.array(group.prompt_token_ids, np.int32), sample.token_ids])
            left = replace(sampling, max_new_tokens=max_new_tokens - len(sample.token_ids))
            number = _call_number(call_number, group.id, sample.sample_index + 1)
            parts.append(Part(prompt, left, 1, number))
            targets.append((group, sample.sample_index))
    return parts, targets


def _call_number(step: int, group: int, part: int) -> int:
    digest = hashlib.sha256(f"{step}/{group}/{part}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
