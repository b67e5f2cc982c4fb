"""`tasuki gateway`: serves the policy of a running node to agents. A session has its turns as a tree of tokens, a secret and a reward."""

import asyncio
import gc
import hmac
import resource
import secrets
import socket
import sys
import time
from base64 import b64encode
from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router

from tasuki.client.chat import Tokenizer
from tasuki.client.episode import Asked, Episode
from tasuki.client.types import Sample, SamplingParams, TrainingSample
from tasuki.config.paths import client_target
from tasuki.config.schema import NodeConfig
from tasuki.gateway.app import SESSION, Refused, answering, application, busy, key_of, read_reward
from tasuki.gateway.rollout import Rollout
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.address import is_beyond_loopback, split_host_port
from tasuki.wire.credentials import read_tokens
from tasuki.wire.errors import InvalidArgument

MAX_SESSIONS, MAX_TOKENS = 4096, 1 << 25
"""Sessions, and tokens of all of them, that are kept."""
_IDLE_S = 7200.0
"""Time after which a session without requests is forgotten when another begins."""
_MANY_CHARACTERS = 16_384
"""Of a prompt that is encoded in a thread, so that other sessions go on; those of images count."""
_BYTES_OF_TOKEN = 64
"""Of an image's file: what a kept one counts against MAX_TOKENS."""
_MAX_ID_CHARACTERS = 128


class Session:
    """One agent's conversations. Requests at once are served side by side: each extends the turns that had been answered when it came."""

    def __init__(self, sessions: "Sessions", session_id: str) -> None:
        self.id, self.key, self._sessions = session_id, secrets.token_urlsafe(24), sessions
        self.episode = Episode(0, {})
        self.num_tokens, self.used_s = 0, time.monotonic()

    async def ask(self, kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        rollout, tokenizer, turns = self._sessions.rollout, self._sessions.tokenizer, self.episode.turns
        read = partial(Asked.of, kind, fields, {}, turns=turns, tokenizer=tokenizer)
        texts = [(message["content"], message.get("tool_calls", "")) for message in fields.get("messages", ())]
        num_characters = len(fields.get("variant", "")) + sum(len(str(text)) + len(str(calls)) for text, calls in texts)
        asked = await asyncio.to_thread(read) if num_characters > _MANY_CHARACTERS else read()
        room = rollout.context_length - asked.num_tokens - 1
        if room < 1:
            problem = f"the prompt has {asked.num_tokens} tokens, and the model a context of {rollout.context_length}"
            raise Refused(400, problem, param="messages", code="context_length_exceeded")
        if (num_tokens := self._sessions.num_tokens) + asked.num_tokens > MAX_TOKENS:
            raise busy(f"sessions hold {num_tokens} tokens of at most {MAX_TOKENS}; DELETE those that have ended")
        wanted = fields["max_new_tokens"]
        sampling = SamplingParams(
            **fields["sampling"], stop=fields["stop"], max_new_tokens=room if wanted is None else min(wanted, room)
        )
        prompt = np.concatenate([asked.token_ids_before, asked.new_token_ids])
        sample = await rollout.complete(prompt, sampling, session_key=self.id, images=asked.images)
        answer = asked.answered(sample, turns=turns, tokenizer=tokenizer)
        turn = turns.turns[-1]
        new = turn.sample.images[0 if turn.parent is None else len(turn.parent.sample.images) :]
        self._sessions.count(self, len(turn.prompt_token_ids) + len(sample.token_ids) + sum(map(len, new)) // _BYTES_OF_TOKEN)
        return answer

    def samples(self) -> dict[str, Any]:
        """The samples of its turns, one for each branch, and the reward.

        Turns without exact log-probs, such as greedy ones, have mask 0; `skipped_turns` counts them.
        """
        turns, reward = self.episode.turns, None if np.isnan(self.episode.reward) else self.episode.reward
        skipped = [turn for turn in turns.turns if not turn.sample.has_exact_log_probs]
        samples = [_as_json(sample) for sample in turns.samples(skipped) if np.any(sample.loss_mask)]
        return {"session_id": self.id, "reward": reward, "samples": samples, "skipped_turns": len(skipped)}


class Sessions:
    """The sessions of a gateway."""

    def __init__(self, rollout: Rollout, tokenizer: Tokenizer, *, model: str, key: str) -> None:
        """key: of the gateway, which opens every session."""
        self.rollout, self.tokenizer, self.model, self.key = rollout, tokenizer, model, key
        self._sessions: dict[str, Session] = {}
        """By id; those used least recently first."""
        self._of_key: dict[str, Session] = {}
        self.num_tokens = 0

    @property
    def max_tokens(self) -> int:
        return self.rollout.context_length

    def count(self, session: Session, num_tokens: int) -> None:
        """Counts tokens that a session keeps, unless it has ended."""
        if self._sessions.get(session.id) is session:
            session.num_tokens += num_tokens
            self.num_tokens += num_tokens

    def session(self, session_id: str | None, key: str) -> Session:
        """The session of a path, which begins with its first request, or of a key.

        The gateway's key without a path has a session for this request alone.
        """
        own = self._of_key.get(key)
        if own is not None and session_id in (None, own.id):
            return self._used(own)
        self._check(key)
        if session_id is None:
            return Session(self, secrets.token_hex(16))
        return self._used(self._sessions[session_id]) if session_id in self._sessions else self.begin(session_id)

    def known(self, session_id: str, key: str) -> Session:
        """Raises Refused if there is no such session."""
        if (own := self._sessions.get(session_id)) is None or own is not self._of_key.get(key):
            self._check(key)
        if own is None:
            raise Refused(404, f"there is no session {session_id}")
        return self._used(own)

    def _used(self, session: Session) -> Session:
        session.used_s = time.monotonic()
        self._sessions[session.id] = self._sessions.pop(session.id)
        return session

    def begin(self, session_id: str) -> Session:
        if not session_id.isprintable() or len(session_id) > _MAX_ID_CHARACTERS:
            raise InvalidArgument("session_id", f"has over {_MAX_ID_CHARACTERS} characters, or some that are not printable")
        while self._sessions and (oldest := next(iter(self._sessions.values()))).used_s < time.monotonic() - _IDLE_S:
            self.end(oldest)
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
        if self._sessions.pop(session.id, None) is not None:
            del self._of_key[session.key]
            self.num_tokens -= session.num_tokens


def _as_json(sample: Sample) -> dict[str, Any]:
    known = TrainingSample.of(sample)
    arrays = ("prompt_token_ids", "completion_token_ids", "rollout_log_probs", "loss_mask")
    fields = {name: np.asarray(getattr(known, name)).tolist() for name in arrays}
    spans = [{"num_tokens": one.num_tokens, "policy_version": one.policy_version} for one in sample.version_spans]
    if len(sample.routed_experts):
        fields["routed_experts"] = np.asarray(sample.routed_experts).tolist()
    if sample.images:
        fields["images"] = [b64encode(image).decode() for image in sample.images]
        fields["image_digest"] = sample.image_digest.hex()
    told = {"policy_version": sample.policy_version, "temperature": sample.temperature, "version_spans": spans}
    return {**fields, **told, "has_exact_log_probs": sample.has_exact_log_probs}


_KEEP_ALIVE_S = 600
"""For longer than clients keep an idle connection: one that both use and close at once resets the request."""


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals to the process."""
        yield


@asynccontextmanager
async def serving(
    served: Router, port: socket.socket, *, cert: Path | None = None, key: Path | None = None
) -> AsyncIterator[None]:
    """Serves as many connections as the hard limit of open files allows. cert, key: of TLS."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    settings = uvicorn.Config(
        served,
        log_level="warning",
        lifespan="off",
        proxy_headers=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=_KEEP_ALIVE_S,
        ssl_certfile=cert,
        ssl_keyfile=key,
    )
    server = _Server(settings)
    task = asyncio.create_task(server.serve([port]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


def run(config: NodeConfig, *, listen: str, key_file: Path | None, acquires: bool) -> int:
    """Serves until Ctrl-C. Prints the address, and a new key unless a file has one. Raises InvalidArgument, NodeDown.

    acquires: see `Rollout`.
    """
    (cert, tls_key), tokenizer = _tls_files(config, listen), ModelTokenizer(config.model.path)
    key = secrets.token_urlsafe(24) if key_file is None else read_tokens("--key-file", key_file)[0]

    async def serve() -> None:
        with bound(listen) as port:
            async with Rollout(client_target(config), decode=tokenizer.decode_whole, acquires=acquires) as rollout:
                sessions = Sessions(rollout, tokenizer, model=config.model.path.name, key=key)
                async with serving(gateway(sessions), port, cert=cert, key=tls_key):
                    sys.stdout.write(f"OPENAI_BASE_URL=http{'s' if cert else ''}://{listen}/v1\n")
                    sys.stdout.write(f"OPENAI_API_KEY={key}\n" if key_file is None else "")
                    sys.stdout.flush()
                    await asyncio.Event().wait()

    gc.freeze()  # what is imported never goes: a collection would search it again and again
    asyncio.run(serve())
    return 0


def _tls_files(config: NodeConfig, listen: str) -> tuple[Path, Path] | tuple[None, None]:
    """Raises InvalidArgument for an address beyond loopback without a certificate."""
    try:
        split_host_port(listen)
    except ValueError as error:
        raise InvalidArgument("--listen", str(error)) from error
    if not is_beyond_loopback(listen):
        return None, None
    if config.security.cert is None or config.security.key is None:
        problem = f"{listen} is not loopback: set security.cert and security.key (`tasuki certs` makes them)"
        raise InvalidArgument("--listen", problem)
    return config.security.cert, config.security.key


def bound(listen: str) -> socket.socket:
    host, port = split_host_port(listen)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise InvalidArgument("--listen", f"{listen}: {error.strerror}; give another address") from error


def gateway(sessions: Sessions) -> Router:
    """The routes of agents, and those of the sessions themselves."""

    def known(request: Request) -> Session:
        return sessions.known(request.path_params["session_id"], key_of(request))

    async def create(request: Request) -> Response:
        session = sessions.create(key_of(request))
        return JSONResponse({"session_id": session.id, "api_key": session.key}, 201)

    async def samples(request: Request) -> Response:
        return JSONResponse(known(request).samples())

    async def reward(request: Request) -> Response:
        known(request).episode.reward = await read_reward(request)
        return Response(status_code=204)

    async def end(request: Request) -> Response:
        sessions.end(known(request))
        return Response(status_code=204)

    return application(
        sessions,
        Route("/sessions", answering(create), methods=["POST"]),
        Route(f"{SESSION}/samples", answering(samples), methods=["GET"]),
        Route(f"{SESSION}/reward", answering(reward), methods=["POST"]),
        Route(SESSION, answering(end), methods=["DELETE"]),
    )
