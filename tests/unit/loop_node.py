"""An in-memory node for training loops: a client that records its calls, rewards by a function, and a loop over both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tasuki.algorithms.loss_types import LossConfig
from tasuki.client.dataset import Dataset, Row
from tasuki.client.encode import enum_to_proto, forward_backward_result
from tasuki.client.rewards import Completion, RewardPool, Scores
from tasuki.client.rl_loop import RlLoop
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.client.types import (
    FinishReason,
    ForwardBackwardResult,
    OptimStepResult,
    Phase,
    Role,
    Sample,
    SamplingParams,
    SaveResult,
    TrainerState,
    TrainingSample,
)
from tasuki.config.train_schema import TrainConfig
from tasuki.v1.trainer_pb2 import ForwardBackwardResponse, RoleState, TokenLogProbs

Reward = Callable[[int, int], float]
"""Maps the prompt's token and the sample's number in its group to a reward."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb, with its arguments."""

    verb: str
    role: Role = Role.POLICY
    samples: Sequence[TrainingSample] = ()
    loss: LossConfig | None = None
    schedule_step: int | None = None
    schedule_steps: int | None = None
    sampling: SamplingParams | None = None
    prompts: Sequence[Sequence[int]] = ()
    phase: Phase | None = None


@dataclass(slots=True)
class LoopClient:
    """Generates completions [prompt's token, number of the call, number in the group], with log-probs of -0.5."""

    num_tokens: Callable[[int, int], int] = lambda prompt, number: 3
    is_exact: bool = True
    skips: set[int] = field(default_factory=set)
    """Numbers of the optimizer steps with non-finite gradients."""
    before_update: Callable[[], None] = lambda: None
    """Callback that forward_backward runs."""
    calls: list[Call] = field(default_factory=list)
    policy_version: int = 0
    critic_version: int = 0
    num_optim_steps: int = 0

    def verbs(self) -> list[str]:
        """Calls as words: the verb, with the phase, and the role unless it is the policy."""
        return [" ".join([call.verb, *_detail(call)]) for call in self.calls]

    def of(self, verb: str, role: Role = Role.POLICY) -> list[Call]:
        return [call for call in self.calls if (call.verb, call.role) == (verb, role)]

    def begin_acquire(self, phase: Phase) -> None:
        self.calls.append(Call("begin_acquire", phase=phase))

    def acquire(self, phase: Phase) -> list[Any]:
        self.calls.append(Call("acquire", phase=phase))
        return []

    def state(self) -> SimpleNamespace:
        return SimpleNamespace(policy_version=self.policy_version)

    def trainer_state(self) -> TrainerState:
        roles = {Role.POLICY: self.policy_version, Role.CRITIC: self.critic_version}
        states = [RoleState(role=enum_to_proto(Role, role), version=version) for role, version in roles.items()]
        return TrainerState(policy_version=self.policy_version, roles=states)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        num_samples: int,
        call_number: int,
        on_progress: Callable[[int, int], None],
        images: Sequence[Sequence[object]] = (),
    ) -> list[Sample]:
        call = len(self.of("generate"))
        self.calls.append(Call("generate", sampling=sampling, prompts=prompts))
        return [
            self._sample(prompt_index, number, [prompt[0], call, number], sampling)
            for prompt_index, prompt in enumerate(prompts)
            for number in range(num_samples)
        ]

    def _sample(self, prompt_index: int, number: int, token_ids: list[int], sampling: SamplingParams) -> Sample:
        length = self.num_tokens(token_ids[0], number)
        tokens = np.resize(np.array(token_ids, dtype=np.int32), length)
        is_cut = sampling.max_new_tokens is not None and length >= sampling.max_new_tokens
        return Sample(
            prompt_index,
            number,
            tokens,
            np.full(length, -0.5, dtype=np.float32),
            FinishReason.LENGTH if is_cut else FinishReason.STOP,
            self.policy_version,
            temperature=sampling.temperature or 1.0,
            has_exact_log_probs=self.is_exact,
        )

    def compute_log_probs(self, samples: Sequence[TrainingSample], *, role: Role = Role.POLICY) -> list[NDArray[np.float32]]:
        self.calls.append(Call("log_probs", role, samples))
        value = -0.75 if role is Role.REFERENCE else -0.625
        return [np.full(len(sample.completion_token_ids), value, dtype=np.float32) for sample in samples]

    def with_old_log_probs(self, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
        scored = zip(samples, self.compute_log_probs(samples), strict=True)
        return [replace(sample, old_log_probs=row) for sample, row in scored]

    def compute_values(self, samples: Sequence[TrainingSample]) -> list[NDArray[np.float32]]:
        self.calls.append(Call("values", samples=samples))
        return [np.full(len(sample.completion_token_ids), 0.25, dtype=np.float32) for sample in samples]

    def forward_backward(
        self,
        samples: Sequence[TrainingSample],
        loss: LossConfig,
        *,
        role: Role = Role.POLICY,
        log_probs_of: Sequence[int] = (),
        request_id: str = "",
    ) -> ForwardBackwardResult:
        self.before_update()
        self.calls.append(Call("forward_backward", role, samples, loss))
        log_probs = [TokenLogProbs(log_probs=[-0.25] * len(samples[place].completion_token_ids)) for place in log_probs_of]
        metrics = {"size": float(len(samples)), "size_max": float(len(samples))}
        return forward_backward_result(ForwardBackwardResponse(metrics=metrics, log_probs=log_probs))

    def optim_step(
        self, *, role: Role = Role.POLICY, schedule_step: int, schedule_steps: int, request_id: str = ""
    ) -> OptimStepResult:
        self.calls.append(Call("optim_step", role, schedule_step=schedule_step, schedule_steps=schedule_steps))
        is_skipped = self.num_optim_steps in self.skips
        self.num_optim_steps += 1
        self.policy_version += role is Role.POLICY and not is_skipped
        self.critic_version += role is Role.CRITIC and not is_skipped
        return OptimStepResult(
            version=self.policy_version,
            grad_norm=float("nan") if is_skipped else 2.0,
            learning_rate=0.5,
            seconds=0.1,
            is_skipped=is_skipped,
        )

    def save(self, path: Path, *, request_id: str = "") -> SaveResult:
        self.calls.append(Call("save"))
        path.mkdir(parents=True)
        return SaveResult(str(path), self.policy_version, 1, 0.1)

    def export_model(self, path: Path) -> SaveResult:
        self.calls.append(Call("export_model"))
        return SaveResult(str(path), self.policy_version, 1, 0.1)


@dataclass(frozen=True, slots=True)
class Rewards:
    """Scores by one function or several, which are summed."""

    functions: dict[str, Reward]

    def score(self, rows: Sequence[Row], completions: Sequence[Completion], *, group_size: int) -> Scores:
        assert len(completions) == len(rows) * group_size
        places = [(int(one.prompt_token_ids[0]), number % group_size) for number, one in enumerate(completions)]
        by_name = {
            name: np.array([function(*place) for place in places], dtype=np.float32)
            for name, function in self.functions.items()
        }
        rewards = np.sum(list(by_name.values()), axis=0, dtype=np.float32)
        num_failed = int(np.isnan(rewards).sum())
        return Scores(rewards, num_failed, by_name)


class Tokenizer:
    def encode_prompt(self, prompt: object, fields: object = None) -> list[int]:
        return [int(str(prompt))]

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        return " ".join(map(str, token_ids))

    decode_whole = decode


def train_config(output_dir: Path, **own: Any) -> TrainConfig:
    """Three groups of four completions in one step, and what is named."""
    required = {"dataset": "train.jsonl", "output_dir": output_dir, "reward": {"function": "rewards:exact"}}
    usual = {
        "num_steps": 1,
        "prompts_per_step": 3,
        "group_size": 4,
        "max_new_tokens": 8,
        "temperature": 0.5,
        "eval_dataset": "held_out.jsonl",
    }
    return TrainConfig.model_validate({**required, **usual, **own})


def changed(settings: TrainConfig, **own: Any) -> TrainConfig:
    """The settings with others in their place, checked."""
    fields = {name: getattr(settings, name) for name in settings.model_fields_set}
    return TrainConfig.model_validate({**fields, **own})


ROWS: list[Row] = [{"prompt": str(number)} for number in range(20)]


def by_number(prompt: int, number: int) -> float:
    """Reward that differs within every group."""
    return float(number)


def equal(prompt: int, number: int) -> float:
    return 1.0


def keys(samples: Sequence[TrainingSample]) -> list[tuple[int, ...]]:
    """Identifies the completions of samples by their token ids."""
    return [tuple(map(int, sample.completion_token_ids)) for sample in samples]


def loop_of(
    client: LoopClient,
    settings: TrainConfig,
    *,
    reward: Reward | dict[str, Reward] = by_number,
    dataset: Dataset | None = None,
    eval_rows: Sequence[Row] = (),
) -> RlLoop:
    rewards = Rewards(reward if isinstance(reward, dict) else {"reward": reward})
    rows = Dataset(ROWS) if dataset is None else dataset
    return RlLoop(cast(Client, client), rows, eval_rows, Tokenizer(), cast(RewardPool, rewards), settings)


def steps_of(loop: RlLoop, *, first_step: int = 0) -> list[Step]:
    """Runs the loop; returns its steps without the last one, which only evaluates."""
    steps: list[Step] = []
    loop.run(steps.append, first_step=first_step)
    return steps[:-1]


def _detail(call: Call) -> list[str]:
    if call.phase is not None:
        return [str(call.phase)]
    return [] if call.role is Role.POLICY else [str(call.role)]
