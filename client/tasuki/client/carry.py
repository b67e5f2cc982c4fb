"""Groups that outlive a changeover: a step takes the first complete ones; the others are cut, and continued after it from their tokens.

A token keeps the version and the log-prob with which it was drawn. G: samples, or episodes, of a group.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tasuki.client import encode, generation
from tasuki.client.dataset import Row
from tasuki.client.episode import Episode
from tasuki.client.episodes import EpisodePool
from tasuki.client.generation import Part
from tasuki.client.images import images_of
from tasuki.client.sync_client import Client
from tasuki.client.types import FinishReason, Sample, SamplingParams
from tasuki.client.version_spans import Decode, continued, left_of, spans_of, unfinished
from tasuki.wire.errors import InvalidArgument, PeerUnavailable

_MAX_LOSSES = 4
"""Generations in a row that may end without a sample."""


@dataclass(slots=True, eq=False)
class CarriedGroup:
    """A row, and the samples or episodes drawn for it so far."""

    id: int
    """Unique in the run; its calls' seeds follow from it."""
    row: Row
    prompt_token_ids: Sequence[int]
    """Empty for episodes."""
    samples: list[Sample] = field(default_factory=list)
    """[G]; cut ones are unfinished, and have no tokens before they begin. Empty for episodes."""
    episodes: list[Episode] = field(default_factory=list)
    """[G]"""

    @classmethod
    def begin(cls, id: int, row: Row, prompt_token_ids: Sequence[int], *, group_size: int) -> "CarriedGroup":  # noqa: A002
        """A group without tokens."""
        samples = [unfinished(prompt_token_ids, sample_index=number) for number in range(group_size)]
        return cls(id, row, prompt_token_ids, samples)

    @classmethod
    def begin_episodes(cls, id: int, row: Row, *, group_size: int) -> "CarriedGroup":  # noqa: A002
        return cls(id, row, (), [], [Episode(id * group_size + number, row) for number in range(group_size)])

    @property
    def is_complete(self) -> bool:
        has_cut = any(sample.finish_reason is FinishReason.CUT for sample in self.samples)
        return not has_cut and all(episode.has_ended for episode in self.episodes)

    @property
    def drawn(self) -> list[Sample]:
        """The samples, or those of the episodes' turns."""
        return [*self.samples, *(sample for episode in self.episodes for sample in episode.drawn())]

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.drawn)

    def oldest_version(self, newest: int) -> int:
        """Version of its oldest token; `newest` without any."""
        return min((span.policy_version for sample in self.drawn for span in spans_of(sample)), default=newest)

    def begin_again(self) -> None:
        self.samples = [unfinished(self.prompt_token_ids, sample_index=one.sample_index) for one in self.samples]
        self.episodes = [Episode(episode.index, self.row) for episode in self.episodes]

    def as_json(self) -> dict[str, Any]:
        """Of episodes that still run, nothing: they begin again."""
        samples = [encode.sample_to_text(sample) for sample in self.samples]
        fields = {"id": self.id, "row": self.row, "prompt_token_ids": list(map(int, self.prompt_token_ids)), "samples": samples}
        return {**fields, "episodes": [episode.as_json() for episode in self.episodes]}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "CarriedGroup":
        """Inverse of `as_json`. Raises InvalidArgument if the record is damaged."""
        try:
            prompt, row, number = list(map(int, fields["prompt_token_ids"])), dict(fields["row"]), int(fields["id"])
            given = {"prompt_token_ids": prompt, "images": images_of(row["prompt"]) if fields["samples"] else ()}
            samples = [encode.sample_from_text(sample, **given) for sample in fields["samples"]]
            episodes = fields.get("episodes", ())
            made = [Episode.of(number * len(episodes) + place, row, one) for place, one in enumerate(episodes)]
            return cls(number, row, prompt, samples, made)
        except (KeyError, TypeError, ValueError, IndexError, DecodeError) as error:
            text = f"a carried group is damaged ({type(error).__name__}: {error}); resume from an earlier checkpoint"
            raise InvalidArgument("output_dir", text) from error


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
    def of(cls, records: Sequence[Mapping[str, Any]]) -> "Carry":
        """Inverse of `records`."""
        return cls([CarriedGroup.of(record) for record in records])

    def records(self) -> list[dict[str, Any]]:
        """The groups as JSON, for the loop's state."""
        return [group.as_json() for group in self.groups]

    def drop_stale(self, *, oldest: int) -> dict[str, float]:
        """Drops what is drawn of groups with a token of a version before `oldest`, whose rows are then generated again."""
        stale = [group for group in self.groups if group.oldest_version(oldest) < oldest]
        metrics = {"dropped_groups": float(len(stale)), "dropped_tokens": float(sum(group.num_tokens for group in stale))}
        for group in stale:
            group.begin_again()
        return metrics

    def take(
        self,
        client: Client,
        sampling: SamplingParams,
        *,
        num_groups: int,
        call_number: int,
        decode: Decode,
        on_progress: Callable[[int, int], None],
    ) -> list[CarriedGroup]:
        """Generates until `num_groups` are complete, cuts the others, and returns the first complete ones, ordered by id.

        Phase TRAIN has then begun, unless so many were complete before. decode: text of token ids with special ones.
        """
        complete = [group for group in self.groups if group.is_complete]
        parts, targets = list[Part](), list[tuple[CarriedGroup, int | None]]()

        def add(sample: Sample) -> bool:
            group, number = targets[sample.prompt_index]
            number = sample.sample_index if number is None else number
            group.samples[number] = continued(group.samples[number], sample, sampling, decode)
            if group.is_complete:
                complete.append(group)
            return len(complete) >= num_groups

        num_losses = 0
        while len(complete) < num_groups:
            parts, targets = _parts(self.groups, sampling, call_number=call_number)
            samples = client.generate_until(parts, add, on_progress=on_progress)
            num_losses = 0 if samples else num_losses + 1
            if num_losses > _MAX_LOSSES:
                raise PeerUnavailable(f"rollout was lost {num_losses} times before a sample was complete", peer="rollout")
        return self._taken(complete[:num_groups])

    def take_episodes(
        self,
        client: Client,
        pool: EpisodePool,
        sampling: SamplingParams,
        *,
        num_groups: int,
        on_progress: Callable[[int, int], None],
    ) -> list[CarriedGroup]:
        """As `take`, of episodes: the turns being drawn are cut, while the functions run on."""
        complete = [group for group in self.groups if group.is_complete]
        episodes = [episode for group in self.groups for episode in group.episodes]

        def is_enough() -> bool:
            complete.extend(group for group in self.groups if group.is_complete and group not in complete)
            return len(complete) >= num_groups

        pool.advance(client, episodes, sampling, is_enough=is_enough, on_progress=on_progress)
        assert is_enough()
        return self._taken(complete[:num_groups])

    def _taken(self, groups: Sequence[CarriedGroup]) -> list[CarriedGroup]:
        self.groups = [group for group in self.groups if group not in groups]
        return sorted(groups, key=lambda group: group.id)


def _parts(
    groups: Sequence[CarriedGroup], sampling: SamplingParams, *, call_number: int
) -> tuple[list[Part], list[tuple[CarriedGroup, int | None]]]:
    """The calls that complete the groups, oldest first, and for each its group and sample; None for a group that has not begun."""
    parts, targets = list[Part](), list[tuple[CarriedGroup, int | None]]()
    for group in groups:
        unfinished = [sample for sample in group.samples if sample.finish_reason is FinishReason.CUT]
        if unfinished and not group.num_tokens:
            number = generation.number_of_call(call_number, group.id, 0)
            parts.append(
                Part(group.prompt_token_ids, sampling, len(group.samples), number, images=images_of(group.row["prompt"]))
            )
            targets.append((group, None))
            continue
        for sample in unfinished:
            prompt = np.concatenate([np.array(group.prompt_token_ids, np.int32), sample.token_ids])
            number = generation.number_of_call(call_number, group.id, sample.sample_index + 1)
            parts.append(Part(prompt, left_of(sampling, sample), 1, number, images=images_of(group.row["prompt"])))
            targets.append((group, sample.sample_index))
    return parts, targets
