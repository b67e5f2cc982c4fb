"""The RL run of a [train] table."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

from tasuki.client.carry import Carry
from tasuki.client.dataset import Dataset, Row, read_jsonl, row_place
from tasuki.client.episodes import EpisodePool
from tasuki.client.estimation import EstimatorState, check_turn_rewards
from tasuki.client.progress import Progress
from tasuki.client.rewards import NamedReward, RewardPool
from tasuki.client.rl_loop import RlLoop
from tasuki.client.sample_dump import SampleDump
from tasuki.client.step import Step
from tasuki.client.sync_client import Client
from tasuki.config.schema import NodeConfig
from tasuki.config.train_schema import RewardConfig, TrainConfig
from tasuki.models.config_json import read_json_object, size
from tasuki.node.model_folder import check_model_folders
from tasuki.runs.folder import EVALUATIONS, SAMPLES, draw_curves, summarize
from tasuki.runs.recipe import RunSettings, field_as_key
from tasuki.runs.resume import Continuation, MakeLoop
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument, NotInstalled
from tasuki.wire.extras import install_extras

_RUNS_PROGRAM, _ASKS_SERVER = "tasuki.gateway.program:run_program", "tasuki.gateway.program:run_on_server"
_EVAL_TEXTS = 256
"""Held-out rows whose prompts and completions are written; of all others the rewards."""


def draw_curve(output_dir: Path, steps: Sequence[Step]) -> None:
    """Reward and held-out score above, the gap between trainer and rollout below."""
    learning = [
        ("mean reward of the samples", "tab:blue", "", lambda step: step.mean_reward),
        ("held-out score", "tab:orange", "o", lambda step: step.eval_score),
    ]
    gap = [
        ("largest", "tab:red", "", lambda step: step.metrics.get("log_prob_gap_max")),
        ("mean", "tab:gray", "", lambda step: step.metrics.get("log_prob_gap")),
    ]
    draw_curves(output_dir, steps, ("reward", learning), ("|trainer - rollout|\nlog-prob", gap), scale="log")


@dataclass(frozen=True, slots=True)
class RlTraining:
    """Trains on rewards of completions."""

    train: TrainConfig
    tokenizer: ModelTokenizer
    rows: list[Row]
    eval_rows: list[Row]
    longest_sample: int
    """Tokens of the longest prompt in `rows` plus the longest allowed completion; of the longest allowed episode."""
    seed: int
    doubts: Sequence[str] = ()
    """What is likely wrong with the run."""

    @property
    def settings(self) -> RunSettings:
        return RunSettings.of(self.train, num_steps=self.train.num_steps)

    @property
    def eval_every(self) -> int | None:
        return self.train.eval_every or self.train.num_steps if self.eval_rows else None

    @property
    def now(self) -> datetime:
        return self.tokenizer.now

    def dataset(self) -> Dataset[Row]:
        return Dataset(self.rows, seed=self.seed)

    @contextmanager
    def opened(self, folders: Sequence[Path], *, save_now: Callable[[], bool], progress: Progress) -> Iterator[MakeLoop]:
        train, inputs = self.train, (self.rows, self.eval_rows)
        num_groups, dumps = train.samples.groups_per_step, (None, None)
        if num_groups:
            samples = SampleDump(train.output_dir / SAMPLES, groups_per_step=num_groups, seed=self.seed)
            evaluations = SampleDump(train.output_dir / EVALUATIONS, groups_per_step=0, num_texts=_EVAL_TEXTS, seed=self.seed)
            dumps = (samples, evaluations)
        with (
            open_rewards(train, folders, *inputs, tokenizer=self.tokenizer, max_tokens=self.longest_sample) as rewards,
            dumps[0] or nullcontext() as dump,
            dumps[1] or nullcontext() as eval_dump,
        ):

            def loop(client: Client, dataset: Dataset[Row], start: Continuation) -> RlLoop:
                state = EstimatorState.of(start.steps[-1].estimator if start.steps else {})
                return RlLoop(
                    client,
                    dataset,
                    self.eval_rows,
                    self.tokenizer,
                    rewards,
                    train,
                    state,
                    dump,
                    eval_dump,
                    save_now,
                    progress,
                    Carry.of(start.carried),
                )

            yield loop

    summarize = staticmethod(summarize)
    draw = staticmethod(draw_curve)


def read_rl(config: NodeConfig, *, now: datetime | None = None) -> RlTraining:
    """now: as of ModelTokenizer. Raises InvalidArgument or PathNotFound, naming the key, the file and the line."""
    train = config.train
    if train is None:
        raise InvalidArgument("train", "the configuration has neither a [train] nor an [sft] table: nothing to train")
    check_model_folders(config)
    with field_as_key("dataset", "train.dataset"):
        rows = read_jsonl(train.dataset, columns=train.columns)
    with field_as_key("dataset", "train.eval_dataset"):
        eval_rows = [] if train.eval_dataset is None else read_jsonl(train.eval_dataset, columns=train.columns)
    table = read_json_object(config.model.path / "config.json", field="model.path")
    table = table.get("text_config", table)
    vocab_size: Any = table.get("vocab_size")  # unknown families may keep it elsewhere
    if isinstance(vocab_size, int) and (unknown := [token for token in train.stop_token_ids if token >= vocab_size]):
        problem = f"{unknown[0]} is not a token id of the model; give 0 to {vocab_size - 1}"
        raise InvalidArgument("train.stop_token_ids", problem, vocab_size=vocab_size)
    tokenizer = ModelTokenizer(config.model.path, now=now)
    context = config.rollout.context_length
    if context is None:
        context = size(table, "max_position_embeddings", default=config.most_micro_batch_tokens)
    limit = min(context, config.most_micro_batch_tokens)
    if train.episode is not None and train.episode.max_tokens is not None:
        if train.episode.max_tokens > limit:
            raise InvalidArgument(
                "train.episode.max_tokens", f"is {train.episode.max_tokens}; a sample may have {limit} tokens"
            )
        limit = train.episode.max_tokens
    check = partial(
        _longest_sample,
        tokenizer=tokenizer,
        is_episode=train.episode is not None,
        limit=limit,
        max_prompt_tokens=train.max_prompt_tokens,
    )
    key, max_new_tokens = "train.max_new_tokens", train.max_new_tokens
    with field_as_key("dataset", "train.dataset"):
        longest = check(rows, key=key, max_new_tokens=max_new_tokens, path=train.dataset)
    if train.eval.max_new_tokens is not None:
        key, max_new_tokens = "train.eval.max_new_tokens", train.eval.max_new_tokens
    with field_as_key("dataset", "train.eval_dataset"):
        check(eval_rows, key=key, max_new_tokens=max_new_tokens, path=str(train.eval_dataset))
    is_chat = any(isinstance(row["prompt"], list) for row in rows)
    doubts = tokenizer.doubts(is_chat=is_chat, stop_token_ids=train.stop_token_ids, stop=train.stop)
    if train.episode is not None:
        doubts += tokenizer.tool_doubts()
    return RlTraining(train, tokenizer, rows, eval_rows, longest if train.episode is None else limit, config.seed, doubts)


def _longest_sample(
    rows: Sequence[Row],
    *,
    tokenizer: ModelTokenizer,
    is_episode: bool,
    limit: int,
    key: str,
    max_new_tokens: int,
    path: Path | str,
    max_prompt_tokens: int | None,
) -> int:
    """Returns the tokens of the longest prompt plus max_new_tokens; 0 without rows.

    limit: tokens of prompt plus completion. max_prompt_tokens: as configured. Raises InvalidArgument naming the first row whose prompt
    is too long or leaves no room for max_new_tokens; or `key`, which sets max_new_tokens, if it leaves no room for any prompt.
    """
    if rows and max_new_tokens >= limit:
        text = f"is {max_new_tokens}, which leaves no room for a prompt: prompt plus completion may have {limit} tokens"
        raise InvalidArgument(key, text, limit=limit)
    longest = 0
    for index, row in enumerate(rows):
        try:
            num_tokens = tokenizer.num_prompt_tokens(row["prompt"], row)
            if is_episode and row.get("tools"):
                tokenizer.tool_call_form(row)
        except InvalidArgument as error:
            raise InvalidArgument("dataset", f"{row_place(path, index)}: {error.message}") from error
        if not num_tokens:
            raise InvalidArgument("dataset", f"{row_place(path, index)}: the prompt has no tokens")
        if max_prompt_tokens is not None and num_tokens > max_prompt_tokens:
            text = f"is {max_prompt_tokens}, but {row_place(path, index)}: the prompt has {num_tokens} tokens; raise it, or remove the row"
            raise InvalidArgument("train.max_prompt_tokens", text, num_tokens=num_tokens)
        if num_tokens > limit - max_new_tokens:
            room = f"with {key}, at most {limit - max_new_tokens} fit"
            text = f"{row_place(path, index)}: the prompt has {num_tokens} tokens; {room}; shorten or remove it"
            raise InvalidArgument("dataset", text, num_tokens=num_tokens)
        longest = max(longest, num_tokens + max_new_tokens)
    return longest


def open_rewards(
    train: TrainConfig,
    folders: Sequence[Path],
    rows: Sequence[Row],
    eval_rows: Sequence[Row],
    *,
    tokenizer: ModelTokenizer | None = None,
    max_tokens: int = 0,
) -> RewardPool | EpisodePool:
    """Starts the workers of `[train.reward]` or `[train.episode]`, which import its functions. Raises as check_reward_rows.

    tokenizer, max_tokens: of episodes; without a tokenizer, to check the rows, one worker suffices.
    """
    key, _ = reward_functions(train)
    with field_as_key(key.partition(".")[2], key):
        if train.episode is not None:
            command, server = train.episode.command, train.episode.server
            _check_program(command, server, folders)
            rewards = EpisodePool(
                train.episode.function or (_RUNS_PROGRAM if command else _ASKS_SERVER),
                command=command or ([server] if server else []),
                tokenizer=tokenizer,
                max_tokens=max_tokens,
                folders=folders,
                num_workers=1 if tokenizer is None else train.episode.num_workers,
                timeout_s=train.episode.timeout_s,
                max_turns=train.episode.max_turns,
                on_error=train.episode.on_error,
                discount=train.episode.discount,
            )
        else:
            assert train.reward is not None
            rewards = RewardPool(
                named_rewards(train.reward),
                folders=folders,
                num_workers=1 if tokenizer is None else train.reward.num_workers,
                timeout_s=train.reward.timeout_s,
                on_error=train.reward.on_error,
            )
    try:
        check_reward_rows(rewards, train, rows=rows, eval_rows=eval_rows)
    except BaseException:
        rewards.close()
        raise
    return rewards


def _check_program(command: Sequence[str], server: str | None, folders: Sequence[Path]) -> None:
    """Raises NotInstalled without the extra that programs and servers need, and InvalidArgument if there is no such program."""
    if (command or server) and None in (find_spec("starlette"), find_spec("uvicorn")):
        text = f"train.episode.{'command' if command else 'server'} needs starlette and uvicorn: {install_extras('gateway')}"
        raise NotInstalled(text, packages="starlette,uvicorn", extras="gateway")
    if command and which(folders[-1] / command[0] if "/" in command[0] else command[0]) is None:
        raise InvalidArgument("episode.command", f"{command[0]} is no program in {folders[-1]} or on the PATH")


def reward_functions(train: TrainConfig) -> tuple[str, list[str]]:
    """The key of the table, and the functions, that give a run its rewards."""
    if train.episode is not None:
        return "train.episode", [train.episode.function or train.episode.server or " ".join(train.episode.command)]
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
