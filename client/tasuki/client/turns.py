"""Turns of an episode as a tree of tokens, and the samples it gives. T is the number of tokens after the first prompt."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasuki.client.types import FinishReason, Routes, Sample, TrainingSample, VersionSpan
from tasuki.client.version_spans import merged, spans_of
from tasuki.wire.errors import InvalidArgument

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A prompt that extends the tokens of an earlier turn exactly, and the tokens drawn for it."""

    parent: "Turn | None"
    prompt_token_ids: NDArray[np.int32]
    """The part of the prompt after the parent's last token; all of it without a parent."""
    sample: Sample
    num_image_tokens: int = 0
    """Of all images up to this turn, beside their placeholders."""

    def own_routes(self) -> Routes:
        """The sample's experts, without those of the tokens that the parent has reported."""
        routes = self.sample.routed_experts
        if self.parent is None:
            return routes
        num_image_tokens = self.num_image_tokens - self.parent.num_image_tokens
        return routes[-len(self.prompt_token_ids) - num_image_tokens - len(self.sample.token_ids) :]

    def path(self) -> "list[Turn]":
        """The turns from the first one to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def token_ids(self) -> NDArray[np.int32]:
        return np.concatenate([part for turn in self.path() for part in (turn.prompt_token_ids, turn.sample.token_ids)])


@dataclass(slots=True, eq=False)
class Turns:
    """The turns of one episode. A prompt that extends no earlier turn begins a branch."""

    turns: list[Turn] = field(default_factory=list)
    is_truncated: bool = False
    """Whether a turn was refused for want of tokens or turns."""
    _of_chat: dict[bytes, Turn] = field(default_factory=dict)
    """By the digest of the chat up to the turn's answer; the latest of equal ones."""
    _of_tokens: dict[bytes, Turn] = field(default_factory=dict)
    """By the digest of the tokens up to its last one."""
    _ambiguous: set[bytes] = field(default_factory=set)
    """Digests of tokens that turns with different images share."""
    _ends: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """Number of tokens, and their hash, by the turn's id."""

    def add(self, turn: Turn, *, chats: Sequence[bytes] = ()) -> None:
        """chats: digests of the chat with its answer, in each form in which the answer was shown."""
        length, tokens = (0, hashlib.sha256()) if turn.parent is None else self._ends[id(turn.parent)]
        tokens = tokens.copy()
        for part in (turn.prompt_token_ids, turn.sample.token_ids):
            tokens.update(part.tobytes())
            length += len(part)
        self.turns.append(turn)
        self._ends[id(turn)] = length, tokens
        key, images = tokens.digest(), turn.sample.images
        if key in self._of_tokens and list(self._of_tokens[key].sample.images) != list(images):
            self._ambiguous.add(key)
        self._of_tokens[key] = turn
        self._of_chat |= dict.fromkeys(chats, turn)

    def extended_by_tokens(self, token_ids: NDArray[np.int32]) -> Turn | None:
        """The latest of the longest turns whose tokens begin `token_ids`, none if no turn does.

        Raises InvalidArgument if such turns have different images.
        """
        found, is_ambiguous, tokens, start = None, False, hashlib.sha256(), 0
        for end in sorted({length for length, _ in list(self._ends.values()) if length < len(token_ids)}):
            tokens.update(token_ids[start:end].tobytes())
            start = end
            if (key := tokens.digest()) in self._of_tokens:
                found, is_ambiguous = self._of_tokens[key], key in self._ambiguous
        if is_ambiguous:
            raise InvalidArgument("token_ids", "continue turns that differ in their images alone; give the chat's messages")
        return found

    def extended_by_chat(self, digests: Sequence[bytes]) -> tuple[Turn, int] | None:
        """The latest of the longest turns whose chat, answer included, begins another, and the answer's place in that; None if none does.

        digests: `ChatDigest.read` of the other chat.
        """
        places = range(len(digests) - 2, -1, -1)
        return next(((self._of_chat[digests[place]], place) for place in places if digests[place] in self._of_chat), None)

    def samples(self, skipped: Sequence[Turn] = ()) -> Iterator[Sample]:
        """Yields a sample for each branch.

        Its `loss_mask` is 1 for tokens that were drawn, in the first branch that has them, and 0 for all others: each is trained
        once, under the prefix it was drawn from. skipped: turns that are not trained.
        """
        trained = {id(turn) for turn in skipped}
        for path in self._branches():
            yield _joined(path, trained, is_truncated=self.is_truncated)
            trained |= {id(turn) for turn in path}

    def numbers(self) -> Iterator[NDArray[np.int32]]:
        """Yields for each of the samples the number of the turn that drew a token, [T]; -1 for tokens that none did."""
        number = {id(turn): place for place, turn in enumerate(self.turns)}
        for path in self._branches():
            parts = [
                ((0 if turn.parent is None else len(turn.prompt_token_ids), -1), (len(turn.sample.token_ids), number[id(turn)]))
                for turn in path
            ]
            yield np.concatenate([np.full(length, value, np.int32) for pair in parts for length, value in pair])

    def _branches(self) -> Iterator[list[Turn]]:
        parents = {id(turn.parent) for turn in self.turns}
        return (turn.path() for turn in self.turns if id(turn) not in parents)


@dataclass(frozen=True, slots=True, eq=False)
class TurnSample(TrainingSample):
    """A branch of an episode whose turns have rewards of their own."""

    turns: NDArray[np.int32] | tuple[()] = ()
    """[T], the number of the turn that drew each token, else -1."""
    turn_returns: NDArray[np.float64] | tuple[()] = ()
    """Of all turns of the episode."""

    @classmethod
    def of_turn(cls, sample: Sample, turns: NDArray[np.int32], turn_returns: NDArray[np.float64]) -> "TurnSample":
        known = TrainingSample.of(sample)
        fields = {name: getattr(known, name) for name in TrainingSample.__slots__}
        return cls(**fields, turns=turns, turn_returns=turn_returns)


class ChatDigest:
    """Digests of a chat up to each of its messages.

    White space around an assistant's text does not count, nor do ids of calls, nor forms of their numbers.
    """

    def __init__(self, variant: str = "") -> None:
        """variant: what else chats must share to extend each other, such as their tools."""
        self._hash = hashlib.sha256(variant.encode())

    def read(self, messages: Sequence[Message]) -> list[bytes]:
        """Takes further messages. Returns the digest after each."""
        return [self._read(message) for message in messages]

    def with_answer(self, message: Message) -> bytes:
        """The digest after one more message, which is not taken."""
        other = ChatDigest()
        other._hash = self._hash.copy()
        return other._read(message)

    def _read(self, message: Message) -> bytes:
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            message = {**message, "content": content.strip()}
        if "tool_calls" in message or "tool_call_id" in message:
            calls = [_without(call, "id") for call in message.get("tool_calls", ())]
            calls = json.loads(json.dumps(calls), parse_int=float)  # a client may write 1.0 as 1
            message = {**_without(message, "tool_call_id"), "tool_calls": calls}
        self._hash.update(b"\n" + json.dumps(message, sort_keys=True).encode())
        return self._hash.digest()


def _without(fields: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != key}


def _joined(path: Sequence[Turn], trained: set[int], *, is_truncated: bool) -> Sample:
    """One sample of a path's turns."""
    token_ids, log_probs, masks, spans, routes = [], [], [], list[VersionSpan](), list[Routes]()
    for turn in path:
        given = 0 if turn.parent is None else len(turn.prompt_token_ids)
        own = spans_of(turn.sample)
        version = own[0].policy_version if own else turn.sample.policy_version
        spans += [VersionSpan(num_tokens=given, policy_version=version)] * bool(given) + list(own)
        token_ids += [turn.prompt_token_ids[len(turn.prompt_token_ids) - given :], turn.sample.token_ids]
        log_probs += [np.zeros(given, np.float32), turn.sample.rollout_log_probs]
        masks += [np.zeros(given, np.float32), np.full(len(turn.sample.token_ids), id(turn) not in trained, np.float32)]
        routes.append(turn.own_routes())
    last, spans = path[-1].sample, merged(spans)
    return replace(
        last,
        token_ids=np.concatenate(token_ids),
        rollout_log_probs=np.concatenate(log_probs),
        finish_reason=FinishReason.LENGTH if is_truncated else last.finish_reason,
        policy_version=spans[-1].policy_version if spans else last.policy_version,
        has_exact_log_probs=all(turn.sample.has_exact_log_probs for turn in path),
        prompt_token_ids=path[0].prompt_token_ids,
        loss_mask=np.concatenate(masks),
        version_spans=spans if len(spans) > 1 else (),
        routed_experts=np.concatenate(routes) if all(map(len, routes)) else (),
        images=last.images,
        image_digest=last.image_digest,
    )
