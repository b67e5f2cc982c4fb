"""Training loops whose client dies before or after any call, and goes on as `tasuki train --resume` does on a living node."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from tasuki.algorithms.losses.value import ValueLoss
from tasuki.client.dataset import Dataset
from tasuki.client.encode import training_sample_to_proto
from tasuki.client.estimation import Estimator, EstimatorState
from tasuki.client.loop_state import newest_checkpoint, read_pending
from tasuki.client.sft_loop import SftLoop
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import Phase, Role, SaveResult
from tasuki.config.train_schema import AdvantageConfig, SftConfig, TrainConfig
from tasuki.runs.earlier_run import EarlierRun, RunHead
from tasuki.runs.resume import Continuation, continuation
from tasuki.wire.errors import GradientsNotFinite
from tests.extent import IS_WHOLE
from tests.unit.loop_node import ROWS, LoopClient, changed, loop_of, train_config
from tests.unit.test_sft_loop import SAMPLES

NUM_SEEDS = 50 if IS_WHOLE else 2
Go = Callable[[LoopClient, Continuation, Callable[[Step], None]], None]


@dataclass(slots=True)
class Node(LoopClient):
    """Answers a repeated call as at first, like the trainer. Every call may be the last of its client, carried out or not."""

    answers: dict[str, tuple[bytes, Any]] = field(default_factory=dict)
    gradients: dict[Role, list[bytes]] = field(default_factory=dict)
    learned: list[tuple[Role, list[bytes], int]] = field(default_factory=list)
    """Each optimizer step: its role, its batches, and its place in the schedule."""
    num_left: Iterator[int] = field(default_factory=lambda: count(1))

    def tick(self) -> None:
        if next(self.num_left) == 0:
            raise KeyboardInterrupt

    def acquire(self, phase: Phase) -> list[Any]:
        assert phase is Phase.TRAIN or not self.gradients
        self.tick()
        return []

    def generate(self, *arguments: Any, call_number: int, **more: Any) -> Any:
        self.tick()
        self.calls.clear()  # their number is in the tokens, and here the call's own is
        samples = LoopClient.generate(self, *arguments, call_number=call_number, **more)
        for sample in samples:
            if len(sample.token_ids) > 1:
                sample.token_ids[1] = call_number % 2**30
        self.tick()
        return samples

    def forward_backward(self, samples: Any, loss: Any, *, request_id: str = "", **more: Any) -> Any:
        def add() -> Any:
            role = more.get("role", Role.POLICY)
            self.gradients.setdefault(role, []).append(batch)
            return LoopClient.forward_backward(self, samples, loss, **more)

        protos = [training_sample_to_proto(sample, index=0).SerializeToString(deterministic=True) for sample in samples]
        batch = b"".join(protos)
        return self.once(request_id, batch + repr((loss, sorted(more.items()))).encode(), add)

    def optim_step(self, *, role: Role = Role.POLICY, schedule_step: int, schedule_steps: int, request_id: str = "") -> Any:
        def step() -> Any:
            self.learned.append((role, self.gradients.pop(role), schedule_step))
            return LoopClient.optim_step(self, role=role, schedule_step=schedule_step, schedule_steps=schedule_steps)

        return self.once(request_id, repr((role, schedule_step, schedule_steps)).encode(), step)

    def save(self, path: Path, *, request_id: str = "") -> SaveResult:
        return self.once(request_id, str(path).encode(), lambda: LoopClient.save(self, path))

    def once(self, request_id: str, content: bytes, run: Callable[[], Any]) -> Any:
        self.tick()
        first, answer = self.answers.get(request_id, (content, None))
        assert first == content, "the id belongs to another call"
        if answer is None:
            try:
                answer = run()
            except GradientsNotFinite as error:
                answer = error
            self.answers[request_id] = content, answer
        self.tick()
        if isinstance(answer, Exception):
            raise answer
        return answer


def lives_of(
    node: Node, output_dir: Path, go: Go, *, dies: Random | None = None, num_calls: int = 0
) -> tuple[list[dict[str, Any]], int]:
    """Trains to the end, as often as the client dies. Returns the figures of the steps and the number of deaths."""
    steps: list[Step] = []
    for number in count():
        checkpoint, loop = newest_checkpoint(output_dir / "checkpoints") or (None, None)
        earlier = EarlierRun(RunHead("run", 0, {}), list(steps), checkpoint, loop)
        pending = read_pending(output_dir)
        found = (
            continuation(earlier, node_version=node.policy_version, is_of_run=True, pending=pending)
            if number
            else Continuation()
        )
        if found.pending is None:
            node.gradients.clear()
        steps[:] = found.steps
        node.num_left = iter(range(10**6, 0, -1)) if dies is None else iter(range(dies.randrange(1, 2 * num_calls), -1, -1))

        def report(step: Step) -> None:
            node.tick()
            steps.append(step)
            node.tick()

        try:
            go(node, found, report)
            return [
                {name: value for name, value in asdict(step).items() if not name.endswith("seconds")} for step in steps
            ], number
        except KeyboardInterrupt:
            continue
    raise AssertionError


def compare(
    output_dir: Path, go: Callable[[Path], Go], *, num_calls: int, skips: frozenset[int] = frozenset(), node: type[Node] = Node
) -> None:
    """num_calls: about the most that a client makes before it dies. node: its type."""
    kind, whole = node, node(skips=set(skips))
    expected, _ = lives_of(whole, output_dir / "whole", go(output_dir / "whole"))
    num_deaths = 0
    for seed in range(NUM_SEEDS):
        client, folder = kind(skips=set(skips)), output_dir / f"killed-{seed}"
        figures, died = lives_of(client, folder, go(folder), dies=Random(seed), num_calls=num_calls)
        assert figures == expected, seed
        assert client.learned == whole.learned, seed
        names = [sorted(path.name for path in each.glob("checkpoints/*/loop.json")) for each in (folder, output_dir / "whole")]
        assert names[0] == names[1]
        num_deaths += died
    assert num_deaths > NUM_SEEDS


PPO = {
    "advantages": AdvantageConfig(estimator=Estimator.GAE), "value_loss": ValueLoss(), "num_epochs": 2, "num_mini_batches": 3,
    "critic_warmup_steps": 2,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": PPO,
    "dapo": {"max_batches": 3, "num_mini_batches": 2},
    "running baseline": {"advantages": AdvantageConfig(estimator=Estimator.RUNNING_BASELINE, kl_coef=0.1, kl_target=0.01)},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_whose_client_dies_at_any_call_learns_and_tells_the_same(tmp_path: Path, kind: str):
    def reward(prompt: int, number: int) -> float:
        return float(prompt % 3 * number)

    def go(folder: Path) -> Go:
        folder.mkdir()
        own: TrainConfig = changed(train_config(folder), num_steps=6, save_every=2, eval_every=2, **KINDS[kind])

        def run(client: LoopClient, found: Continuation, report: Callable[[Step], None]) -> None:
            dataset = Dataset(ROWS, seed=3)
            found.seek(dataset)
            loop = loop_of(client, own, reward=reward, dataset=dataset, eval_rows=ROWS[:2])
            loop.state = EstimatorState.of(found.steps[-1].estimator if found.steps else {})
            loop.run(report, first_step=found.first_step, pending=found.pending)

        return run

    compare(tmp_path, go, num_calls=50 if kind == "ppo" else 15, skips=frozenset({3}))


def test_a_supervised_run_whose_client_dies_at_any_call_learns_and_tells_the_same(tmp_path: Path):
    def go(folder: Path) -> Go:
        folder.mkdir()
        own = SftConfig(dataset=folder, samples_per_step=2, output_dir=folder, save_every=2)

        def run(client: LoopClient, found: Continuation, report: Callable[[Step], None]) -> None:
            dataset = Dataset(SAMPLES, seed=1)
            found.seek(dataset)
            loop = SftLoop(cast(Client, client), dataset, (), own, 6)
            loop.run(report, first_step=found.first_step, pending=found.pending)

        return run

    compare(tmp_path, go, num_calls=12)
