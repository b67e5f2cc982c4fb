"""Completions of a step or an evaluation for inspection: all rewards, some texts, and of few their tokens."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.client.dataset import Row
from tasuki.client.encode import TokenIds
from tasuki.client.rewards import Completion, Scores
from tasuki.client.types import Sample, TrainingSample

_MAX_LOG_PROBS = 131_072
"""Maximum tokens whose log-probs one ForwardBackward returns."""
_DIGITS, _GAP_DIGITS = 6, 9
"""Decimal places; in float32 trainer and rollout differ by 1e-7."""


@dataclass(slots=True, eq=False)
class ShownSample:
    """A completion with its advantage, tokens and log-probs."""

    scored: dict[str, Any]
    """What is written of every completion, with its text."""
    prompt_token_ids: TokenIds
    sample: Sample
    learned: TrainingSample | None = None
    """None if no update used the sample."""
    trainer_log_probs: NDArray[np.float32] | None = None
    """[T], of the policy at the start of the step."""

    def record(self) -> dict[str, Any]:
        """Formats the completion as one line of the file; non-finite numbers become null."""
        sample, learned = self.sample, self.learned
        gaps = _gaps(sample, self.trainer_log_probs)
        return {
            **self.scored,
            "advantage": None if learned is None else _number(float(np.mean(learned.advantages))),
            "log_prob_gap": None if gaps is None else _number(float(gaps.mean()), digits=_GAP_DIGITS),
            "log_prob_gap_max": None if gaps is None else _number(float(gaps.max()), digits=_GAP_DIGITS),
            "temperature": sample.temperature,
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": sample.token_ids.tolist(),
            "loss_mask": np.asarray(sample.loss_mask, int).tolist() or None,
            "advantages": None if learned is None or np.ndim(learned.advantages) == 0 else _numbers(learned.advantages),
            "rollout_log_probs": _numbers(sample.rollout_log_probs),
            "trainer_log_probs": None if self.trainer_log_probs is None else _numbers(self.trainer_log_probs),
        }


@dataclass(slots=True, eq=False)
class ShownSamples:
    """Completions of one step or evaluation. Those without tokens are converted at once, so that they keep no arrays alive."""

    step: int
    num_groups: int = 0
    """Groups written with tokens and log-probs, chosen by `seed`; the step's first ones."""
    num_texts: int = 0
    """First groups written with prompt and completions. Of further ones only rewards are, and nothing if both numbers are 0."""
    seed: int = 0
    samples: list[ShownSample] = field(default_factory=list)
    others: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the other groups."""
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
        """Adds the groups of one generation. The lists are ordered by row. shaped_S: the rewards used for advantages."""
        if not (self.num_groups or self.num_texts):
            return
        num_wanted = min(self.num_groups - self.num_shown_groups(), len(rows))
        chosen = set(np.random.default_rng([self.seed, self.step, self._num_seen]).permutation(len(rows))[:num_wanted].tolist())
        size = len(samples) // len(rows)
        for index, row in enumerate(rows):
            for place in range(index * size, (index + 1) * size):
                sample, completion = samples[place], completions[place]
                scored = {
                    "step": self.step,
                    "group": self._num_seen + index,
                    "sample": place - index * size,
                    "policy_version": sample.policy_version,
                    "version_spans": [[span.num_tokens, span.policy_version] for span in sample.version_spans] or None,
                    "finish_reason": sample.finish_reason.lower(),
                    "reward": _number(float(shaped_S[place])),
                    "rewards": {name: _number(float(values_S[place])) for name, values_S in scores.by_name.items()},
                    "failure": (scores.failures[place] if scores.failures else "") or None,
                }
                if index in chosen or self._num_seen + index < self.num_texts:
                    fields = {name: value for name, value in row.items() if name != "prompt"}
                    scored |= {"prompt": row["prompt"], "fields": fields, "completion": completion.text}
                if index in chosen:
                    self.samples.append(ShownSample(scored, completion.prompt_token_ids, sample))
                else:
                    self.others.append(scored)
        self._num_seen += len(rows)

    def num_shown_groups(self) -> int:
        return len({one.scored["group"] for one in self.samples})

    def add_learned(self, learned: Sequence[TrainingSample], samples: Sequence[Sample]) -> None:
        """Adds the training samples with advantages. samples: the completion behind each."""
        shown = {id(one.sample): one for one in self.samples}
        for training, sample in zip(learned, samples, strict=True):
            one = shown.get(id(sample))
            if one is not None and len(training.completion_token_ids) == len(sample.token_ids):  # not another branch
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
        for one in (*(one.record() for one in self.samples), *self.others):
            text = json.dumps(one, ensure_ascii=False, default=str) + "\n"
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
    gaps = np.abs(trainer_log_probs - sample.rollout_log_probs)
    return gaps[np.asarray(sample.loss_mask, bool)] if len(sample.loss_mask) else gaps


def _number(value: float, *, digits: int = _DIGITS) -> float | None:
    return round(value, digits) if math.isfinite(value) else None


def _numbers(values: Any) -> list[float | None]:
    rounded = np.asarray(values, dtype=np.float64).round(_DIGITS)
    numbers: list[float | None] = rounded.tolist()
    for place in np.flatnonzero(~np.isfinite(rounded)).tolist():
        numbers[place] = None
    return numbers
