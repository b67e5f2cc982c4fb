"""Samples of a step chosen for inspection: collected by reference during the loop, converted to JSON by the writer."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.client.dataset import Row
from tasuki.client.rewards import Completion, Scores
from tasuki.client.types import Sample, TrainingSample

_MAX_LOG_PROBS = 131_072
"""Maximum tokens whose log-probs one ForwardBackward returns."""
_DIGITS, _GAP_DIGITS = 6, 9
"""Decimal places; in float32 trainer and rollout differ by 1e-7."""


@dataclass(slots=True, eq=False)
class ShownSample:
    """One completion with its reward, advantage and log-probs."""

    group: int
    """Index of its prompt within the step."""
    row: Row
    text: str
    sample: Sample
    reward: float
    """The reward used for advantages: the weighted sum, after shaping."""
    rewards: dict[str, float]
    learned: TrainingSample | None = None
    """None if no update used the sample."""
    trainer_log_probs: NDArray[np.float32] | None = None
    """[T], of the policy at the start of the step."""

    def record(self, step: int) -> dict[str, Any]:
        """Formats the sample as one line of the file; non-finite numbers become null."""
        sample, learned = self.sample, self.learned
        gaps = _gaps(sample, self.trainer_log_probs)
        return {
            "step": step,
            "group": self.group,
            "sample": sample.sample_index,
            "policy_version": sample.policy_version,
            "prompt": self.row["prompt"],
            "fields": {name: value for name, value in self.row.items() if name != "prompt"},
            "completion": self.text,
            "finish_reason": sample.finish_reason.lower(),
            "reward": _number(self.reward),
            "rewards": {name: _number(value) for name, value in self.rewards.items()},
            "advantage": None if learned is None else _number(float(np.mean(learned.advantages))),
            "log_prob_gap": None if gaps is None else _number(float(gaps.mean()), digits=_GAP_DIGITS),
            "log_prob_gap_max": None if gaps is None else _number(float(gaps.max()), digits=_GAP_DIGITS),
            "temperature": sample.temperature,
            "token_ids": sample.token_ids.tolist(),
            "advantages": None if learned is None or np.ndim(learned.advantages) == 0 else _numbers(learned.advantages),
            "rollout_log_probs": _numbers(sample.rollout_log_probs),
            "trainer_log_probs": None if self.trainer_log_probs is None else _numbers(self.trainer_log_probs),
        }


@dataclass(slots=True, eq=False)
class ShownSamples:
    """Samples of one step to show."""

    step: int
    num_groups: int = 0
    """Number of groups to show; 0 collects nothing."""
    seed: int = 0
    samples: list[ShownSample] = field(default_factory=list)
    _num_seen: int = 0
    _learned: dict[int, ShownSample] = field(default_factory=dict)
    _is_scored: bool = False

    def add(
        self,
        rows: Sequence[Row],
        completions: Sequence[Completion],
        samples: Sequence[Sample],
        scores: Scores,
        shaped_S: NDArray[np.float32],
    ) -> None:
        """Chooses among the groups of one generation until the step has enough. The lists are ordered by row."""
        num_wanted = min(self.num_groups - len({one.group for one in self.samples}), len(rows))
        if num_wanted > 0:
            size = len(samples) // len(rows)
            chosen = np.random.default_rng([self.seed, self.step, self._num_seen]).permutation(len(rows))[:num_wanted]
            for index in sorted(chosen.tolist()):
                for place in range(index * size, (index + 1) * size):
                    rewards = {name: float(values_S[place]) for name, values_S in scores.by_name.items()}
                    one = ShownSample(
                        self._num_seen + index,
                        rows[index],
                        completions[place].text,
                        samples[place],
                        float(shaped_S[place]),
                        rewards,
                    )
                    self.samples.append(one)
        self._num_seen += len(rows)

    def add_learned(self, learned: Sequence[TrainingSample], samples: Sequence[Sample]) -> None:
        """Adds the training samples with advantages. samples: the completion behind each."""
        shown = {id(one.sample): one for one in self.samples}
        for training, sample in zip(learned, samples, strict=True):
            one = shown.get(id(sample))
            if one is not None:
                one.learned, self._learned[id(training)] = training, one
                if len(training.old_log_probs):
                    one.trainer_log_probs = np.asarray(training.old_log_probs)

    def wanted(self, batch: Sequence[TrainingSample]) -> list[int]:
        """Positions in the step's first batch whose log-probs are needed; later batches use other weights."""
        if self._is_scored:
            return []
        self._is_scored = True
        wanted: list[int] = []
        room = _MAX_LOG_PROBS
        for position, training in enumerate(batch):
            one = self._learned.get(id(training))
            if one is not None and one.trainer_log_probs is None and len(training.completion_token_ids) <= room:
                wanted.append(position)
                room -= len(training.completion_token_ids)
        return wanted

    def add_log_probs(
        self, batch: Sequence[TrainingSample], wanted: Sequence[int], log_probs: Sequence[NDArray[np.float32]]
    ) -> None:
        """log_probs: of the samples at the positions from `wanted`; empty if the trainer had none."""
        for position, row in zip(wanted, log_probs, strict=False):
            if (one := self._learned.get(id(batch[position]))) is not None:
                one.trainer_log_probs = row

    def lines(self, *, max_bytes: int) -> list[bytes]:
        """Lines that fit into `max_bytes`."""
        lines: list[bytes] = []
        room = max_bytes
        for one in self.samples:
            text = json.dumps(one.record(self.step), ensure_ascii=False, default=str) + "\n"
            # JSON escapes represent what UTF-8 cannot.
            line = text.encode(errors="backslashreplace")
            room -= len(line)
            if room < 0:
                break
            lines.append(line)
        return lines


def _gaps(sample: Sample, trainer_log_probs: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    if trainer_log_probs is None or not len(trainer_log_probs):
        return None
    return np.abs(trainer_log_probs - sample.rollout_log_probs)


def _number(value: float, *, digits: int = _DIGITS) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def _numbers(values: Any) -> list[float | None]:
    rounded = np.asarray(values, dtype=np.float64).round(_DIGITS)
    numbers: list[float | None] = rounded.tolist()
    for place in np.flatnonzero(~np.isfinite(rounded)).tolist():
        numbers[place] = None
    return numbers
