"""Sessions of agents: each has its turns as a tree of tokens, a secret of its own, and a reward."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np

from tasuki.client.episode import Asked, ChatTokenizer, Episode
from tasuki.client.types import SamplingParams, TrainingSample
from tasuki.gateway.app import Refused, busy
from tasuki.gateway.rollout import Rollout
from tasuki.wire.errors import InvalidArgument

MAX_SESSIONS, MAX_TOKENS = 4096, 1 << 25
"""Sessions, and tokens of all of them, that are kept."""
_MAX_ID_CHARACTERS = 128


class Session:
    """One agent's conversations. Requests at once are served side by side: each extends the turns that had been answered when it came."""

    def __init__(self, sessions: Sessions, session_id: str) -> None:
        self.id, self.key, self._sessions = session_id, secrets.token_urlsafe(24), sessions
        self.episode = Episode(0, {})
        self.num_tokens = 0

    async def ask(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        rollout, tokenizer, turns = self._sessions.rollout, self._sessions.tokenizer, self.episode.turns
        asked = await asyncio.to_thread(Asked.of, kind, fields, {}, turns=turns, tokenizer=tokenizer)
        room = rollout.context_length - asked.num_tokens - 1
        if room < 1:
            problem = f"the prompt has {asked.num_tokens} tokens, and the model a context of {rollout.context_length}"
            raise Refused(400, problem, param="messages", code="context_length_exceeded")
        if self._sessions.num_tokens() + asked.num_tokens > MAX_TOKENS:
            raise busy(
                f"sessions hold {self._sessions.num_tokens()} tokens of at most {MAX_TOKENS}; DELETE those that have ended"
            )
        wanted = fields["max_new_tokens"]
        sampling = SamplingParams(
            **fields["sampling"], stop=fields["stop"], max_new_tokens=room if wanted is None else min(wanted, room)
        )
        prompt = np.concatenate([asked.token_ids_before, asked.new_token_ids])
        sample = await rollout.complete(prompt, sampling, session_key=self.id)
        answer = asked.answered(sample, turns=turns, tokenizer=tokenizer)
        turn = turns.turns[-1]
        self.num_tokens += len(turn.prompt_token_ids) + len(turn.sample.token_ids)
        return answer

    def samples(self) -> dict[str, Any]:
        """The training samples of its turns, one for each branch, and the reward."""
        reward = None if np.isnan(self.episode.reward) else self.episode.reward
        return {"session_id": self.id, "reward": reward, "samples": [_as_json(one) for one in self.episode.training_samples()]}


class Sessions:
    """The sessions of a gateway."""

    def __init__(self, rollout: Rollout, tokenizer: ChatTokenizer, *, model: str, key: str) -> None:
        """key: of the gateway, which opens every session."""
        self.rollout, self.tokenizer, self.model, self.key = rollout, tokenizer, model, key
        self._sessions: dict[str, Session] = {}
        self._of_key: dict[str, Session] = {}

    @property
    def max_tokens(self) -> int:
        return self.rollout.context_length

    def num_tokens(self) -> int:
        return sum(session.num_tokens for session in self._sessions.values())

    def session(self, session_id: str | None, key: str) -> Session:
        """The session of a path, which begins with its first request, or of a key.

        The gateway's key without a path has a session for this request alone.
        """
        own = self._of_key.get(key)
        if own is not None and session_id in (None, own.id):
            return own
        self._check(key)
        if session_id is None:
            return Session(self, secrets.token_hex(16))
        return self._sessions[session_id] if session_id in self._sessions else self.begin(session_id)

    def known(self, session_id: str, key: str) -> Session:
        """Raises Refused if there is no such session."""
        if (own := self._sessions.get(session_id)) is None or own is not self._of_key.get(key):
            self._check(key)
        if own is None:
            raise Refused(404, f"there is no session {session_id}")
        return own

    def begin(self, session_id: str) -> Session:
        if not session_id.isprintable() or len(session_id) > _MAX_ID_CHARACTERS:
            raise InvalidArgument("session_id", f"has over {_MAX_ID_CHARACTERS} characters, or some that are not printable")
        if len(self._sessions) >= MAX_SESSIONS:
            raise busy(f"{MAX_SESSIONS} sessions are open; DELETE those that have ended")
        session = self._sessions[session_id] = Session(self, session_id)
        self._of_key[session.key] = session
        return session

    def create(self, key: str) -> Session:
        """A new session."""
        self._check(key)
        return self.begin(secrets.token_hex(16))

    def _check(self, key: str) -> None:
        if not hmac.compare_digest(key.encode(), self.key.encode()):
            raise Refused(401, "the key is not this gateway's or session's", kind="authentication_error")

    def end(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        self._of_key.pop(session.key, None)


def _as_json(sample: TrainingSample) -> dict[str, Any]:
    arrays = ("prompt_token_ids", "completion_token_ids", "rollout_log_probs", "loss_mask")
    spans = [{"num_tokens": one.num_tokens, "policy_version": one.policy_version} for one in sample.version_spans]
    fields = {name: np.asarray(getattr(sample, name)).tolist() for name in arrays}
    return {**fields, "policy_version": sample.policy_version, "temperature": sample.temperature, "version_spans": spans}
