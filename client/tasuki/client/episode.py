"""Episodes of one call: their state, turns and results. P prompts, G episodes of each."""

import math
import os
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.client import encode
from tasuki.client.async_client import AsyncClient
from tasuki.client.chat import Tokenizer
from tasuki.client.dataset import Row, prompt_problem
from tasuki.client.generation import Part
from tasuki.client.images import images_of
from tasuki.client.rewards import Scores
from tasuki.client.turns import ChatDigest, Turn, Turns, TurnSample
from tasuki.client.types import Sample, SamplingParams, TrainingSample
from tasuki.client.version_spans import Decode, continued, left_of, unfinished
from tasuki.client.worker_process import WorkerProcess
from tasuki.wire.errors import InvalidArgument, PeerUnavailable


@dataclass(slots=True, eq=False)
class Episode:
    """One run of the function for a row, and what it gave."""

    index: int
    """Its place among the call's episodes."""
    row: Row
    turns: Turns = field(default_factory=Turns)
    id: int = -1
    """Of its run: of all that a pool begins, no two have the same."""
    num_runs: int = 0
    num_refused: int = 0
    num_losses: int = 0
    reward: float = math.nan
    turn_rewards: Mapping[str, float] = field(default_factory=dict)
    """By the turn's number, if the function has called `policy.reward`."""
    turn_returns: NDArray[np.float64] | None = None
    """Of each turn: its reward and the discounted ones of later turns; None if the episode's reward is for all its tokens."""
    failure: str = ""
    """Why it has no reward, or an empty string."""
    runs_since: float | None = None
    """Time at which it last began to run by itself; None while it waits for the policy."""
    num_open: int = 0
    """Turns that the policy generates."""
    has_ended: bool = False
    cut: "list[tuple[int, Asked]]" = field(default_factory=list)
    """Turns to be continued, each with the number of its question."""

    def drawn(self) -> list[Sample]:
        """What the policy has drawn, unfinished turns included."""
        return [
            *(turn.sample for turn in self.turns.turns),
            *(asked.before for _, asked in self.cut if asked.before is not None),
        ]

    def as_json(self) -> dict[str, Any] | None:
        """None while it runs."""
        place, of_row = {id(turn): number for number, turn in enumerate(self.turns.turns)}, images_of(self.row.get("prompt"))
        turns = [
            [
                None if turn.parent is None else place[id(turn.parent)],
                turn.prompt_token_ids.tolist(),
                encode.sample_to_text(turn.sample),
                turn.num_image_tokens,
                [
                    of_row.index(image) if image in of_row else b64encode(image).decode()
                    for image in turn.sample.images[0 if turn.parent is None else len(turn.parent.sample.images) :]
                ],
            ]
            for turn in self.turns.turns
        ]
        reward = None if math.isnan(self.reward) else self.reward
        told = {"reward": reward, "failure": self.failure, "turn_rewards": self.turn_rewards, "turns": turns}
        return {**told, "is_truncated": self.turns.is_truncated} if self.has_ended else None

    @classmethod
    def of(cls, index: int, row: Row, fields: Mapping[str, Any] | None) -> "Episode":
        """Inverse of `as_json`. Raises KeyError, IndexError, TypeError, ValueError or protobuf's DecodeError."""
        if fields is None:
            return cls(index, row)
        turns, of_row = Turns(is_truncated=bool(fields["is_truncated"])), images_of(row.get("prompt"))
        for parent, prompt, sample, num_image_tokens, new in fields["turns"]:
            before = None if parent is None else turns.turns[parent]
            images = [*(() if before is None else before.sample.images)]
            images += [of_row[one] if isinstance(one, int) else b64decode(one) for one in new]
            drawn = encode.sample_from_text(sample, prompt_token_ids=(), images=images)
            turns.add(Turn(before, np.array(prompt, np.int32), drawn, num_image_tokens))
        reward = math.nan if fields["reward"] is None else float(fields["reward"])
        told = {"turn_rewards": dict(fields["turn_rewards"]), "failure": str(fields["failure"])}
        return cls(index, row, turns, reward=reward, has_ended=True, **told)

    def training_samples(self) -> list[TrainingSample]:
        """One for each branch with tokens to train, without advantages."""
        if self.turn_returns is None:
            return [TrainingSample.of(sample) for sample in self.turns.samples() if np.any(sample.loss_mask)]
        pairs = zip(self.turns.samples(), self.turns.numbers(), strict=True)
        return [TurnSample.of_turn(sample, turns, self.turn_returns) for sample, turns in pairs if np.any(sample.loss_mask)]

    def sample(self) -> Sample:
        """The longest branch; empty without a turn."""
        return max(self.turns.samples(), key=lambda sample: len(sample.token_ids), default=unfinished(()))


def credit_turns(group: Sequence[Episode], *, discount: float, failed: float) -> None:
    """Computes the return of each turn, if an episode of the group has rewarded turns; others have their reward at the last one.

    failed: reward of an episode that failed.
    """
    if not any(episode.turn_rewards for episode in group):
        return
    for episode in group:
        returns = np.zeros(len(episode.turns.turns))
        reward = failed if episode.failure else episode.reward
        rewards = np.zeros(len(returns))
        for turn, value in (episode.turn_rewards or {str(len(returns) - 1): reward}).items():
            rewards[int(turn) :][:1] += value  # none without a turn
        following = 0.0
        for turn in reversed(range(len(returns))):
            returns[turn] = following = rewards[turn] + discount * following
        episode.turn_returns = returns


@dataclass(frozen=True, slots=True, eq=False)
class Episodes:
    """The episodes of P rows, G of each, in order."""

    episodes: Sequence[Episode]
    scores: Scores

    def samples(self, *, num_samples: int) -> tuple[list[list[int]], list[Sample]]:
        """The first prompt of each row, and a sample of each of its `num_samples` episodes."""
        samples = [one.sample() for one in self.episodes]
        return [np.asarray(one.prompt_token_ids, dtype=np.int32).tolist() for one in samples[::num_samples]], samples

    def figures(self) -> dict[str, float]:
        turns = [len(one.turns.turns) for one in self.episodes]
        branches = [len(one.training_samples()) for one in self.episodes]
        cut = [one.turns.is_truncated for one in self.episodes]
        means = {"turns": turns, "branches": branches, "truncated": cut}
        return {f"episode/{name}": float(np.mean(values)) for name, values in means.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A turn that an episode asks for."""

    parent: Turn | None
    token_ids_before: NDArray[np.int32]
    new_token_ids: NDArray[np.int32]
    row: Row
    chat: ChatDigest | None = None
    """None for a prompt of token ids."""
    stop: Sequence[str] = ()
    """Texts that end the answer, and are not shown."""
    images: Sequence[bytes] = ()
    """Of the whole prompt."""
    num_image_tokens: int = 0
    """Of them, beside their placeholders."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    call_number: int = 0
    session_key: str = ""
    before: Sample | None = None
    """What was drawn before a changeover."""

    @classmethod
    def of(cls, kind: str, fields: Mapping[str, Any], row: Row, *, turns: Turns, tokenizer: Tokenizer) -> "Asked":
        """The prompt as an extension of an earlier turn. kind: "generate" or "chat", see `Policy`. Raises InvalidArgument."""
        none, stop = np.zeros(0, np.int32), fields.get("stop") or ()
        if kind == "generate":
            token_ids = np.array(fields["token_ids"], np.int32)
            parent = turns.extended_by_tokens(token_ids)
            before, images = (none, ()) if parent is None else (parent.token_ids(), parent.sample.images)
            more = tokenizer.num_image_tokens(images)
            return cls(parent, before, token_ids[len(before) :], row, stop=stop, images=images, num_image_tokens=more)
        messages, tools = fields["messages"], fields["tools"]
        if problem := prompt_problem(messages) if isinstance(messages, list) else "is no list of messages":
            raise InvalidArgument("messages", problem)
        given = {"tools": tools, "chat_template_kwargs": fields.get("chat_template_kwargs")}
        row = {**row, **{name: value for name, value in given.items() if value}}
        if row.get("tools"):
            tokenizer.tool_call_form(row)  # refused before anything is drawn
        chat = ChatDigest(fields.get("variant", ""))
        parent, place = turns.extended_by_chat(chat.read(messages)) or (None, -1)
        earlier = () if parent is None else parent.sample.images
        images = images_of(messages[place + 1 :], before=earlier, field="messages")
        num_image_tokens = tokenizer.num_image_tokens(images)
        if parent is None:
            before, new = none, tokenizer.encode_prompt(messages, row)
        else:
            last = int(drawn[-1]) if len(drawn := parent.sample.token_ids) else None
            before, new = parent.token_ids(), tokenizer.encode_next(messages, place, row, last_token_id=last)
        return cls(parent, before, np.array(new, np.int32), row, chat, stop, images, num_image_tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids_before) + len(self.new_token_ids) + self.num_image_tokens

    def answered(self, sample: Sample, *, turns: Turns, tokenizer: Tokenizer) -> dict[str, Any]:
        """Adds the turn, and returns what its episode is told."""
        token_ids = sample.token_ids.tolist()
        answer = tokenizer.read_answer(token_ids, self.row)
        for number, call in enumerate(answer["tool_calls"]):  # ids of nine characters, which some templates demand
            call.setdefault("id", f"{(self.num_tokens + len(token_ids)) % 10**6:06d}{number % 10**3:03d}")
        shown = shown_message(answer, self.stop)
        chats = [] if self.chat is None else [self.chat.with_answer(one) for one in (answer["message"], shown)]
        parent, new = self.parent, self.new_token_ids
        if parent is not None and parent.sample.temperature != sample.temperature:  # a training sample has one
            parent, new = None, np.concatenate([self.token_ids_before, new])
        turn = Turn(parent, new, replace(sample, images=self.images), self.num_image_tokens)
        if parent is not None and len(
            sample.routed_experts
        ):  # a long episode would keep those of its first tokens for every turn
            turn = replace(turn, sample=replace(turn.sample, routed_experts=np.copy(turn.own_routes())))
        turns.add(turn, chats=chats)
        context = [*self.token_ids_before.tolist(), *self.new_token_ids.tolist(), *token_ids]
        reason = sample.finish_reason.lower()
        log_probs = sample.rollout_log_probs.tolist()
        del answer["written"]
        told = {"token_ids": token_ids, "log_probs": log_probs, "context": context, "finish_reason": reason, "shown": shown}
        told["stop"] = next((end for end in self.stop if end in answer["text"]), None)
        return {**answer, **told, "turn": len(turns.turns) - 1, "num_prompt_tokens": self.num_tokens}

    async def draw(self, client: AsyncClient, *, is_carried: bool, decode: Decode) -> Sample:
        """is_carried: whether a changeover cuts it at once; what is drawn until then has FinishReason.CUT."""
        prompt = np.concatenate([self.token_ids_before, self.new_token_ids])
        if not is_carried:
            number, key = self.call_number, self.session_key
            given = {"call_number": number, "session_key": key, "images": [self.images]}
            (sample,) = await client.generate([prompt], self.sampling, **given)
            return sample
        before = self.before or unfinished(prompt)
        tokens, left = np.concatenate([prompt, before.token_ids]), left_of(self.sampling, before)
        part = Part(tokens, left, 1, self.call_number, self.session_key, self.images)
        try:
            sample = await client.generate_if_served(part)
        except PeerUnavailable:
            sample = None
        if sample is None or not len(sample.token_ids):
            return before
        return continued(before, sample, self.sampling, decode)


def shown_message(answer: Mapping[str, Any], stop: Sequence[str]) -> dict[str, Any]:
    """The assistant's message as clients of a chat API see it: a call that cannot be read is text, as it was written."""
    calls = answer["tool_calls"]
    if any("error" in call for call in calls):
        return {"role": "assistant", "content": answer["written"]}
    text = answer["text"]
    for end in stop:
        text = text.partition(end)[0]
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


class Batch:
    """The episodes of one call, or of all that outlive changeovers."""

    def __init__(self, number: int, sampling: SamplingParams, *, is_carried: bool = False) -> None:
        self.number, self.sampling, self.is_carried = number, sampling, is_carried
        self.told_meanwhile: list[Sequence[Any]] = []
        """Messages of its episodes that came while another batch ran."""
        self.running: dict[int, Episode] = {}
        self.worker_of: dict[int, WorkerProcess] = {}
        self.generated: dict[tuple[int, int], Future[Sample]] = {}
        """By the episode's run and the number of its question."""
        self.lost: list[tuple[WorkerProcess, str]] = []
        """Workers that have ended, and how."""
        self.arrived: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self.wake, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = threading.Lock()

    def begin(self, episodes: Sequence[Episode], on_progress: Callable[[int, int], None]) -> None:
        self.episodes, self._on_progress = episodes, on_progress
        self._num_ended = self._num_tokens = 0

    def release(self, workers: Collection[WorkerProcess]) -> list[Episode]:
        """Forgets the running episodes that are not wanted any more, which it returns, and those whose worker has ended."""
        wanted, now = {id(episode) for episode in self.episodes}, time.monotonic()
        for episode in self.running.values():
            episode.runs_since = episode.runs_since and now  # what it has told meanwhile is yet to be read
        unwanted = [episode for episode in self.running.values() if id(episode) not in wanted]
        kept = {run: one for run, one in self.running.items() if id(one) in wanted and self.worker_of[run] in workers}
        self.running = kept
        return unwanted

    def count(self, *, ended: int = 0, tokens: int = 0) -> None:
        self._num_ended, self._num_tokens = self._num_ended + ended, self._num_tokens + tokens
        if ended:
            self._on_progress(self._num_ended, self._num_tokens)

    def arrive(self, *arrival: Any) -> None:
        """Called on the client's thread."""
        self.arrived.put(arrival)
        with self._closing:
            if self._wakes >= 0:
                with suppress(BlockingIOError):  # it wakes anyway
                    os.write(self._wakes, b"\0")

    def close(self) -> None:
        with self._closing:
            os.close(self.wake)
            os.close(self._wakes)
            self._wakes = -1
