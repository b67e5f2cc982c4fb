"""Groups carried over changeovers: continued from their tokens, trained once, bounded in age, and resumed after any death."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tasuki.algorithms.loss_types import Correction, LossConfig
from tasuki.client.carry import Carry
from tasuki.client.dataset import Dataset
from tasuki.client.estimation import Estimator, EstimatorState
from tasuki.client.generation import Part
from tasuki.client.step import Step
from tasuki.client.types import FinishReason, Sample, TrainingSample
from tasuki.client.version_spans import spans_of
from tasuki.config.train_schema import AdvantageConfig, TrainConfig
from tasuki.runs.resume import Continuation
from tests.unit.loop_node import ROWS, LoopClient, by_number, changed, equal, loop_of, steps_of, train_config
from tests.unit.test_killed_loop import Go, Node, compare

CARRIED = {"oversample": 1.5, "max_staleness": 2, "prompts_per_step": 4, "group_size": 2, "max_new_tokens": 40, "num_steps": 8}


def length(prompt: int) -> int:
    """Tokens of a prompt's completions: most are short, every fifth is long."""
    return 30 if prompt % 5 == 0 else 3


@dataclass(slots=True)
class Cutting(Node):
    """Draws a token a tick for every sample: the position in the sample and the version. Long ones are cut."""

    asked: list[list[tuple[int, int, int]]] = field(default_factory=list)
    """Of each generation: prompt, tokens before, and samples of each part."""
    max_ticks: int = 10**6
    """After which it cuts what runs though it was not told to, as another client's changeover would."""

    def generate_until(self, parts: Sequence[Part], add: Callable[[Sample], bool], *, on_progress: Any = None) -> list[Sample]:
        self.tick()
        self.asked.append([(int(part.prompt[0]), len(part.prompt) - 1, part.num_samples) for part in parts])
        running = [
            (place, number, len(part.prompt) - 1, int(part.prompt[0]))
            for place, part in enumerate(parts)
            for number in range(part.num_samples)
        ]
        samples: list[Sample] = []
        is_enough, tick = False, 0
        while running and not is_enough and tick < self.max_ticks:
            tick += 1
            for run in list(running):
                place, _, before, prompt = run
                limit = parts[place].sampling_params.max_new_tokens
                assert limit is not None
                if tick in (length(prompt) - before, limit):
                    running.remove(run)
                    samples.append(self._drawn(*run, tick, FinishReason.LENGTH if tick == limit else FinishReason.STOP))
                    is_enough = add(samples[-1]) or is_enough
        for run in running:
            samples.append(self._drawn(*run, tick, FinishReason.CUT))
            add(samples[-1])
        self.tick()
        return samples

    def _drawn(self, place: int, number: int, before: int, prompt: int, num: int, reason: FinishReason) -> Sample:
        tokens = np.arange(before, before + num, dtype=np.int32)
        log_probs = np.full(num, -0.5 - self.policy_version, dtype=np.float32)
        return Sample(place, number, tokens, log_probs, reason, self.policy_version, temperature=0.5)


def trained(client: LoopClient) -> list[TrainingSample]:
    return [sample for call in client.of("forward_backward") for sample in call.samples]


def test_a_cut_group_goes_on_from_its_tokens_and_is_trained_once_with_the_versions_that_drew_it(tmp_path: Path) -> None:
    client, settings = Cutting(), train_config(tmp_path, **CARRIED)
    loop = loop_of(client, settings, dataset=Dataset(ROWS, seed=3))
    steps = steps_of(loop)
    samples = trained(client)
    assert [len(call.samples) for call in client.of("forward_backward")] == [8] * 8
    for call, step in zip(client.of("forward_backward"), steps, strict=True):
        assert step.policy_version is not None
        for sample in call.samples:
            tokens, version = list(sample.completion_token_ids), step.policy_version
            assert tokens == list(range(length(int(sample.prompt_token_ids[0])))), (
                "no token is lost, drawn again or out of order"
            )
            drawn_by = [-0.5 - span.policy_version for span in sample.version_spans for _ in range(span.num_tokens)]
            assert list(sample.rollout_log_probs) == (drawn_by or [-0.5 - sample.policy_version] * len(tokens))
            assert version - 2 <= min([sample.policy_version, *(span.policy_version for span in sample.version_spans)])
            assert max([sample.policy_version, *(span.policy_version for span in sample.version_spans)]) <= version
    assert any(len(sample.version_spans) > 1 for sample in samples)
    assert max(step.metrics["staleness_max"] for step in steps) > 0
    carried = [one for asked in client.asked for one in asked if one[1]]
    assert carried and all(num_samples == 1 for *_, num_samples in carried)


def test_a_group_beyond_the_bound_is_dropped_whole_and_its_prompt_generated_again(tmp_path: Path) -> None:
    client, settings = Cutting(), train_config(tmp_path, **CARRIED | {"max_staleness": 1, "num_steps": 20})
    loop = loop_of(client, settings, dataset=Dataset(ROWS, seed=3))
    steps = steps_of(loop)
    num_dropped = sum(step.metrics["dropped_groups"] for step in steps)
    assert num_dropped and sum(step.metrics["dropped_tokens"] for step in steps)
    assert max(step.metrics["staleness_max"] for step in steps) <= 1
    num_rows = steps[-1].position["epoch"] * len(ROWS) + steps[-1].position["next"]
    assert num_rows == 20 * 4 + len(loop.carry.groups), "a row is trained, or waits"


def test_a_changeover_of_another_client_costs_no_token(tmp_path: Path) -> None:
    client = Cutting(max_ticks=2)
    steps_of(loop_of(client, train_config(tmp_path, **CARRIED | {"num_steps": 2})))
    assert len(client.asked) > 2
    for sample in trained(client):
        assert list(sample.completion_token_ids) == list(range(length(int(sample.prompt_token_ids[0]))))


def test_a_stop_text_that_a_changeover_has_split_ends_the_completion(tmp_path: Path) -> None:
    client = Cutting(max_ticks=3)
    steps_of(loop_of(client, train_config(tmp_path, **CARRIED | {"num_steps": 3, "stop": ["2 3"]})))
    samples = trained(client)
    assert {len(sample.version_spans) for sample in samples} == {0, 2}
    for sample in samples:
        assert list(sample.completion_token_ids) == list(range(3 if length(int(sample.prompt_token_ids[0])) == 3 else 4))


def test_a_rollout_that_is_lost_again_and_again_ends_the_run(tmp_path: Path) -> None:
    class Lost(Cutting):
        def generate_until(self, *arguments: Any, **more: Any) -> list[Sample]:
            return []

    with pytest.raises(Exception, match="rollout was lost"):
        steps_of(loop_of(Lost(), train_config(tmp_path, **CARRIED)))


@pytest.mark.parametrize("teaches", [True, False])
def test_a_run_with_carried_groups_whose_client_dies_at_any_call_learns_and_tells_the_same(tmp_path: Path, teaches: bool):
    def reward(prompt: int, number: int) -> float:
        return by_number(prompt, number) if teaches or prompt % 2 else equal(prompt, number)

    def go(folder: Path) -> Go:
        folder.mkdir()
        own: TrainConfig = changed(train_config(folder), **CARRIED, save_every=3, eval_dataset=None)

        def run(client: LoopClient, found: Continuation, report: Callable[[Step], None]) -> None:
            dataset = Dataset(ROWS, seed=3)
            found.seek(dataset)
            loop = loop_of(client, own, reward=reward if teaches else equal, dataset=dataset)
            loop.state = EstimatorState.of(found.steps[-1].estimator if found.steps else {})
            loop.carry = Carry.of(found.carried)
            loop.run(report, first_step=found.first_step, pending=found.pending)

        return run

    compare(tmp_path, go, num_calls=15, node=Cutting)


def test_the_state_of_carried_groups_is_whole(tmp_path: Path) -> None:
    client = Cutting()
    loop = loop_of(client, train_config(tmp_path, **CARRIED | {"num_steps": 2}), dataset=Dataset(ROWS, seed=3))
    steps_of(loop)
    assert any(len(spans_of(sample)) > 0 for group in loop.carry.groups for sample in group.samples)
    records = loop.carry.records()
    assert records and Carry.of(records).records() == records


@pytest.mark.parametrize(
    ("own", "key"),
    [
        ({"oversample": 0.5}, "oversample"),
        ({"oversample": 1.5}, "max_staleness"),
        ({"oversample": 1.5, "max_staleness": 1, "num_mini_batches": 2}, "max_staleness"),
        ({"oversample": 1.5, "max_staleness": 1, "max_batches": 2}, "oversample"),
        (
            {"oversample": 1.5, "max_staleness": 1, "advantages": AdvantageConfig(estimator=Estimator.GREEDY_BASELINE)},
            "oversample",
        ),
        (
            {"oversample": 1.5, "max_staleness": 1, "loss": LossConfig(correction=Correction(token_truncation=None))},
            "oversample",
        ),
    ],
)
def test_what_cannot_be_carried_is_refused_by_its_key(tmp_path: Path, own: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as refused:
        train_config(tmp_path, **own)
    assert key in str(refused.value)
