"""The RL run of a [train] table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from shutil import which

from tasuki.client.carry import Carry
from tasuki.client.dataset import Dataset, Row
from tasuki.client.episodes import EpisodePool
from tasuki.client.estimation import EstimatorState, check_turn_rewards
from tasuki.client.progress import Progress
from tasuki.client.rewards import NamedReward, RewardPool
from tasuki.client.rl_loop import RlLoop
from tasuki.client.sample_dump import SampleDump
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.config.train_schema import RewardConfig, TrainConfig
from tasuki.runs.continuation import Continuation
from tasuki.runs.folder import EVALUATIONS, SAMPLES, draw_curve, summarize
from tasuki.runs.inputs import TrainInputs
from tasuki.runs.settings import RunSettings, field_as_key
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.runs.training import MakeLoop
from tasuki.wire.errors import InvalidArgument, NotInstalled
from tasuki.wire.extras import install_extras

_RUNS_PROGRAM = "tasuki.gateway.program:run_program"
_EVAL_TEXTS = 256
"""Held-out rows whose prompts and completions are written; of all others the rewards."""


@dataclass(frozen=True, slots=True)
class RlTraining:
    """Trains on rewards of completions."""

    inputs: TrainInputs

    @property
    def settings(self) -> RunSettings:
        return rl_run_settings(self.inputs.train)

    @property
    def eval_every(self) -> int | None:
        train = self.inputs.train
        return train.eval_every or train.num_steps if self.inputs.eval_rows else None

    @property
    def longest_sample(self) -> int:
        return self.inputs.longest_sample

    @property
    def now(self) -> datetime:
        return self.inputs.tokenizer.now

    def dataset(self) -> Dataset[Row]:
        return Dataset(self.inputs.rows, seed=self.inputs.seed)

    @contextmanager
    def opened(self, folders: Sequence[Path], *, save_now: Callable[[], bool], progress: Progress) -> Iterator[MakeLoop]:
        inputs = self.inputs
        with (
            open_rewards(inputs.train, folders, tokenizer=inputs.tokenizer, max_tokens=inputs.longest_sample) as rewards,
            _sample_dump(inputs, SAMPLES) as dump,
            _sample_dump(inputs, EVALUATIONS) as eval_dump,
        ):
            check_reward_rows(rewards, inputs.train, rows=inputs.rows, eval_rows=inputs.eval_rows)

            def loop(client: Client, dataset: Dataset[Row], start: Continuation) -> RlLoop:
                state = EstimatorState.of(start.steps[-1].estimator if start.steps else {})
                return RlLoop(
                    client,
                    dataset,
                    inputs.eval_rows,
                    inputs.tokenizer,
                    rewards,
                    inputs.train,
                    state,
                    dump,
                    eval_dump,
                    save_now,
                    progress,
                    Carry.of(start.carried),
                )

            yield loop

    def summary(self, steps: Sequence[Step], *, seconds: float, changeovers: int, policy_version: int) -> dict[str, object]:
        seed = self.inputs.seed
        return summarize(steps, seed=seed, seconds=seconds, changeovers=changeovers, policy_version=policy_version)

    def draw(self, steps: Sequence[Step]) -> None:
        draw_curve(self.inputs.train.output_dir, steps)


def _sample_dump(inputs: TrainInputs, name: str) -> AbstractContextManager[SampleDump | None]:
    num_groups = inputs.train.samples.groups_per_step
    if not num_groups:
        return nullcontext()
    folder = inputs.train.output_dir / name
    if name == EVALUATIONS:
        return SampleDump(folder, groups_per_step=0, num_texts=_EVAL_TEXTS, seed=inputs.seed)
    return SampleDump(folder, groups_per_step=num_groups, seed=inputs.seed)


def rl_run_settings(train: TrainConfig) -> RunSettings:
    return RunSettings(
        table="train",
        output_dir=train.output_dir,
        num_steps=train.num_steps,
        length_key="train.num_steps",
        save_every=train.save_every,
        keep_last=train.keep_last,
        stop_at_eval_score=train.stop_at_eval_score,
    )


def open_rewards(
    train: TrainConfig, folders: Sequence[Path], *, tokenizer: ModelTokenizer | None, max_tokens: int, is_check: bool = False
) -> RewardPool | EpisodePool:
    """Starts the workers of `[train.reward]` or `[train.episode]`, which import its functions. Raises InvalidArgument naming the key.

    tokenizer, max_tokens: of episodes. is_check: whether one worker suffices.
    """
    key, _ = reward_functions(train)
    with field_as_key(key.partition(".")[2], key):
        if train.episode is not None:
            _check_program(train.episode.command, folders)
            return EpisodePool(
                train.episode.function or _RUNS_PROGRAM,
                command=train.episode.command,
                tokenizer=tokenizer,
                max_tokens=max_tokens,
                folders=folders,
                num_workers=1 if is_check else train.episode.num_workers,
                timeout_s=train.episode.timeout_s,
                max_turns=train.episode.max_turns,
                on_error=train.episode.on_error,
                discount=train.episode.discount,
            )
        assert train.reward is not None
        return RewardPool(
            named_rewards(train.reward),
            folders=folders,
            num_workers=1 if is_check else train.reward.num_workers,
            timeout_s=train.reward.timeout_s,
            on_error=train.reward.on_error,
        )


def _check_program(command: Sequence[str], folders: Sequence[Path]) -> None:
    """Raises NotInstalled without the extra that programs need, and InvalidArgument if there is no such program."""
    if command and None in (find_spec("starlette"), find_spec("uvicorn")):
        text = f"train.episode.command needs starlette and uvicorn: {install_extras('gateway')}"
        raise NotInstalled(text, packages="starlette,uvicorn", extras="gateway")
    if command and which(folders[-1] / command[0] if "/" in command[0] else command[0]) is None:
        raise InvalidArgument("episode.command", f"{command[0]} is no program in {folders[-1]} or on the PATH")


def reward_functions(train: TrainConfig) -> tuple[str, list[str]]:
    """The key of the table, and the functions, that give a run its rewards."""
    if train.episode is not None:
        return "train.episode", [train.episode.function or " ".join(train.episode.command)]
    assert train.reward is not None
    function = train.reward.function
    return "train.reward", [function] if isinstance(function, str) else list(function.values())


def check_reward_rows(
    rewards: RewardPool | EpisodePool, train: TrainConfig, *, rows: Sequence[Row], eval_rows: Sequence[Row]
) -> None:
    """Raises InvalidArgument for a function that takes what a row lacks, or gives rewards that the advantages do not take."""
    if isinstance(rewards, EpisodePool) and rewards.rewards_turns:
        check_turn_rewards(train.advantages)
    key, _ = reward_functions(train)
    with field_as_key(key.partition(".")[2], key):
        rewards.check_rows(rows, path=train.dataset)
        rewards.check_rows(eval_rows, path=str(train.eval_dataset))


def named_rewards(reward: RewardConfig) -> str | list[NamedReward]:
    """The `function` argument of RewardPool."""
    if isinstance(reward.function, str):
        return reward.function
    return [NamedReward(name, function, reward.weights.get(name, 1.0)) for name, function in reward.function.items()]
