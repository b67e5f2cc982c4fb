"""The gateway without a node: histories that agents send, and answers that a changeover has cut."""

import asyncio
import os
import resource
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tasuki.client.async_client import AsyncClient
from tasuki.client.episode import Asked, Episode
from tasuki.client.generation import Part
from tasuki.client.types import FinishReason, NodeState, Phase, RolloutState, Sample, SamplingParams, VersionSpan
from tasuki.client.version_spans import stopped
from tasuki.gateway.app import Refused, answering, application, read_reward
from tasuki.gateway.chat_completions import read_chat
from tasuki.gateway.rollout import Rollout
from tasuki.gateway.server import MAX_SESSIONS, Sessions, gateway, serving
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.errors import InvalidArgument, PeerUnavailable
from tasuki.wire.stages import Stage
from tests.models import EOS, char_tokenizer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
A = char_tokenizer().convert_tokens_to_ids("a")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return ModelTokenizer(folder)


@pytest.fixture
def sessions(tokenizer: ModelTokenizer) -> Sessions:
    return Sessions(Rollout("unix:nowhere", decode=tokenizer.decode_whole), tokenizer, model="m", key="secret")


def sample(token_ids: list[int], *, temperature: float = 1.0, **fields: Any) -> Sample:
    log_probs = np.zeros(len(token_ids), np.float32)
    return Sample(0, 0, np.array(token_ids, np.int32), log_probs, FinishReason.STOP, 3, temperature, **fields)


_STEPS = st.lists(
    st.tuples(
        st.integers(0, 7),
        st.sampled_from(["whole", "shortened", "swapped", "edited", "stripped", "other tools"]),
        st.integers(0, 9),
        st.lists(st.integers(A, A + 2), min_size=1, max_size=3),
        st.booleans(),
        st.sampled_from([1.0, 1.0, 0.5]),
    ),
    min_size=1,
    max_size=10,
)


@given(steps=_STEPS)
def test_a_token_is_trained_once_under_the_prompt_it_was_drawn_from_whatever_the_history(
    tokenizer: ModelTokenizer, steps: list[tuple[int, str, int, list[int], bool, float]]
):
    episode, histories = Episode(0, {}), [list[dict[str, Any]]()]
    drawn_under: list[tuple[tuple[int, ...], int, float]] = []
    for choice, change, place, letters, has_ended, temperature in steps:
        messages = list(histories[choice % len(histories)])
        match change if messages else "whole":
            case "shortened":
                messages = messages[: place % len(messages)]
            case "swapped":
                first = place % len(messages)
                messages[first], messages[0] = messages[0], messages[first]
            case "edited":
                messages[place % len(messages)] = {"role": "assistant", "content": f"edited {place}"}
            case "stripped":
                messages = [
                    {**one, "content": f"{one['content']} " * (one["role"] == "assistant") or one["content"]}
                    for one in messages
                ]
            case _:
                pass
        messages.append({"role": "user", "content": f"q{place % 2}"})
        choices = read_chat(
            {"messages": messages, "stop": "c", **({"chat_template_kwargs": {}} if change != "other tools" else {})}
        )
        asked = Asked.of("chat", choices.fields, {}, turns=episode.turns, tokenizer=tokenizer)
        prompt = [*asked.token_ids_before.tolist(), *asked.new_token_ids.tolist()]
        drawn = [*letters, *([EOS] if has_ended else [])]
        answer = asked.answered(sample(drawn, temperature=temperature), turns=episode.turns, tokenizer=tokenizer)
        drawn_under += [((*prompt, *drawn[:number]), token, temperature) for number, token in enumerate(drawn)]
        histories.append([*messages, answer["shown"]])
    trained: list[tuple[tuple[int, ...], int, float]] = []
    for one in episode.training_samples():
        whole = [*np.asarray(one.prompt_token_ids).tolist(), *np.asarray(one.completion_token_ids).tolist()]
        start = len(one.prompt_token_ids)
        assert one.temperature is not None
        trained += [
            (tuple(whole[: start + number]), whole[start + number], one.temperature) for number in np.flatnonzero(one.loss_mask)
        ]
    assert sorted(trained) == sorted(drawn_under)


def test_a_history_that_extends_a_turn_goes_on_from_its_tokens(tokenizer: ModelTokenizer):
    episode, messages = Episode(0, {}), [{"role": "user", "content": "q"}]
    for change in (lambda text: text, str.strip, lambda text: f"{text}\n"):
        fields = read_chat({"messages": messages, "stop": ["c"]}).fields
        asked = Asked.of("chat", fields, {}, turns=episode.turns, tokenizer=tokenizer)
        assert (asked.parent is None) is not bool(episode.turns.turns)
        answer = asked.answered(sample([A, A + 1, A + 2]), turns=episode.turns, tokenizer=tokenizer)
        assert answer["shown"]["content"] == "ab"  # the stop text is drawn, but not shown
        messages += [{"role": "assistant", "content": change("ab"), "refusal": None}, {"role": "user", "content": "more"}]
    fields = read_chat({"messages": messages, "tools": [{"type": "function"}]}).fields
    assert fields["variant"] != read_chat({"messages": messages}).fields["variant"]
    (trained,) = episode.training_samples()
    assert np.sum(trained.loss_mask) == 9


def test_a_stop_text_that_a_changeover_has_split_ends_the_answer(tokenizer: ModelTokenizer):
    spans = [VersionSpan(num_tokens=2, policy_version=3), VersionSpan(num_tokens=3, policy_version=4)]
    joined = sample([A, A + 1, A + 2, A, A], version_spans=spans)
    cut = stopped(joined, ["zz", "bc"], tokenizer.decode_whole, num_before=2)
    assert cut.token_ids.tolist() == [A, A + 1, A + 2]
    assert len(cut.rollout_log_probs) == 3
    assert [(one.num_tokens, one.policy_version) for one in cut.version_spans] == [(2, 3), (1, 4)]
    assert stopped(joined, ["b"], tokenizer.decode_whole, num_before=1).version_spans == ()
    assert stopped(joined, ["zz"], tokenizer.decode_whole, num_before=2) is joined
    silent = 120  # without a text: rollout searches one token more than the text has bytes
    for tokens, is_found in (([A, silent, A + 1], True), ([A, silent, silent, A + 1], False)):
        ended = stopped(sample([*tokens, A]), ["ab"], tokenizer.decode_whole, num_before=1)
        assert len(ended.token_ids) == len(tokens) + (not is_found)


def test_sessions_are_told_apart_by_their_secrets_and_have_a_limit(sessions: Sessions):
    made = sessions.create("secret")
    assert sessions.session(None, made.key) is sessions.session(made.id, made.key) is sessions.known(made.id, "secret") is made
    other = sessions.session("chosen", "secret")
    assert sessions.session(None, "secret") not in (made, other)
    for wrong in ((made.id, other.key), (other.id, made.key), ("new", made.key), (None, "é"), (made.id, "")):
        with pytest.raises(Refused) as refused:
            sessions.session(*wrong)
        assert refused.value.status == 401
    for _ in range(MAX_SESSIONS - 2):
        sessions.create("secret")
    with pytest.raises(Refused, match="DELETE") as refused:
        sessions.session("one more", "secret")
    assert refused.value.status == 503
    sessions.end(made)
    assert sessions.session("one more", "secret").id == "one more"


def test_idle_sessions_make_room_and_ended_ones_keep_no_tokens(sessions: Sessions, monkeypatch: pytest.MonkeyPatch):
    idle, used = sessions.create("secret"), sessions.create("secret")
    for session in (idle, used):
        sessions.count(session, 10)
    later = time.monotonic() + 10_000
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert sessions.session(None, used.key) is used
    new = sessions.create("secret")
    assert (sessions.known(used.id, "secret"), sessions.known(new.id, "secret"), sessions.num_tokens) == (used, new, 10)
    with pytest.raises(Refused, match="no session"):
        sessions.known(idle.id, "secret")
    sessions.end(used)
    sessions.count(used, 5)  # an answer after its end
    assert sessions.num_tokens == 0


def test_turns_without_exact_log_probs_are_not_trained(sessions: Sessions, tokenizer: ModelTokenizer):
    session = sessions.create("secret")
    messages: list[dict[str, Any]] = []
    for is_exact in (True, False, True):
        messages.append({"role": "user", "content": "q"})
        fields = read_chat({"messages": messages}).fields
        asked = Asked.of("chat", fields, {}, turns=session.episode.turns, tokenizer=tokenizer)
        drawn = sample([A, A + 1], has_exact_log_probs=is_exact)
        messages.append(asked.answered(drawn, turns=session.episode.turns, tokenizer=tokenizer)["shown"])
    given = session.samples()
    (one,) = given["samples"]
    assert (given["skipped_turns"], one["has_exact_log_probs"], sum(one["loss_mask"])) == (1, False, 4)


async def test_long_tools_are_read_beside_the_event_loop(sessions: Sessions, monkeypatch: pytest.MonkeyPatch):
    def read(*_: object, **__: object) -> Asked:
        raise InvalidArgument("messages", threading.current_thread().name)

    monkeypatch.setattr(Asked, "of", read)
    session = sessions.create("secret")
    for characters, name in ((1, "MainThread"), (20_000, "asyncio_0")):
        fields = read_chat({"messages": [{"role": "user", "content": "q"}], "tools": ["a" * characters]}).fields
        with pytest.raises(InvalidArgument, match=name):
            await session.ask("chat", fields)


async def test_rollout_that_restarts_asleep_is_acquired_again_or_refused_in_time(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
):
    asked, acquired, stage = list[Part](), list[Phase](), [0]

    async def generate(_: AsyncClient, part: Part) -> Sample | None:
        asked.append(part)
        return sample([A] * 4) if stage[0] else None

    async def state(_: AsyncClient) -> RolloutState:
        if restarting and restarting.pop():
            raise PeerUnavailable("restarts", peer="rollout")
        return RolloutState(stage=stage[0])

    async def node_state(_: AsyncClient) -> NodeState:
        return NodeState()

    async def acquire(_: AsyncClient, phase: Phase) -> None:
        acquired.append(phase)
        stage[0] = Stage.RESUME_KV.number

    restarting = list[bool]()
    for name, value in (
        ("generate_if_served", generate), ("rollout_state", state), ("acquire", acquire), ("state", node_state)
    ):  # fmt: skip
        monkeypatch.setattr(AsyncClient, name, value)
    monkeypatch.setattr("tasuki.gateway.rollout._LOST_S", 0.5)
    sampling = SamplingParams(max_new_tokens=4)
    rollout, restarting = Rollout("unix:nowhere", decode=tokenizer.decode_whole), [True] * 2
    rollout._take(Phase.ROLLOUT)
    asking = asyncio.create_task(rollout.complete(np.array([A], np.int32), sampling, session_key="s"))
    while restarting:
        await asyncio.sleep(0.05)
    stage[0] = Stage.RESUME_KV.number
    assert len((await asking).token_ids) == 4, "there is no limit while the node restarts rollout"
    stage[0] = 0
    asked.clear()
    for acquires in (False, True):
        rollout = Rollout("unix:nowhere", decode=tokenizer.decode_whole, acquires=acquires)
        rollout._take(Phase.ROLLOUT)
        asking = [rollout.complete(np.array([A], np.int32), sampling, session_key=str(number)) for number in range(20)]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        if not acquires:
            assert all(isinstance(one, PeerUnavailable) for one in answers)
            assert len(asked) <= 20, "one task polls rollout, not each request"
            stage[0] = Stage.RESUME_KV.number  # somebody has acquired it
            async with asyncio.timeout(60):
                while rollout._lost:
                    await asyncio.sleep(0.05)
            assert len((await rollout.complete(np.array([A], np.int32), sampling, session_key="s")).token_ids) == 4
            stage[0] = 0
        else:
            assert all(isinstance(one, Sample) for one in answers)
            assert acquired == [Phase.ROLLOUT]


@pytest.mark.parametrize("pieces", [(4,), (0, 4), (1, 0, 3)])
async def test_an_answer_that_a_changeover_cuts_at_its_last_token_is_whole(
    tokenizer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch, pieces: Sequence[int]
):
    left = list(pieces)

    async def cut(_: AsyncClient, part: Part) -> Sample:
        assert part.sampling_params.max_new_tokens == sum(left)
        return replace(sample([A] * left.pop(0)), finish_reason=FinishReason.CUT)

    monkeypatch.setattr(AsyncClient, "generate_if_served", cut)
    rollout = Rollout("unix:nowhere", decode=tokenizer.decode_whole)
    rollout._serves.set()
    whole = await rollout.complete(np.array([A], np.int32), SamplingParams(max_new_tokens=4), session_key="s")
    assert (len(whole.token_ids), whole.finish_reason, list(whole.prompt_token_ids)) == (4, FinishReason.LENGTH, [A])


async def test_more_agents_than_the_soft_limit_of_open_files_are_served(sessions: Sessions):
    sessions.rollout.context_length = 64
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    headers, limits = {"authorization": "Bearer secret"}, httpx.Limits(max_connections=None)
    try:
        with socket.create_server(("127.0.0.1", 0)) as port:
            base_url = f"http://127.0.0.1:{port.getsockname()[1]}"
            async with (
                serving(gateway(sessions), port),
                httpx.AsyncClient(base_url=base_url, headers=headers, limits=limits, timeout=60) as http,
            ):
                answers = await asyncio.gather(*(http.get("/v1/models") for _ in range(40)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert {answer.status_code for answer in answers} == {200}


async def test_requests_that_cannot_be_told_or_read_are_refused(sessions: Sessions):
    async def reward(request: Request) -> Response:
        return JSONResponse(await read_reward(request))

    deep = "[" * 700 + "]" * 700
    call = f'{{"function": {{"name": "f", "arguments": {{"x": {deep}}}}}}}'
    served = application(sessions, Route("/reward", answering(reward), methods=["POST"]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://gateway") as http:
        for path, asked in (
            ("/v1/chat/completions", r'{"\ud800": 1}'),
            ("/reward", '{"reward": 1' + "0" * 400 + "}"),
            ("/v1/chat/completions", f'{{"messages": [{{"role": "assistant", "tool_calls": [{call}]}}]}}'),
        ):
            answer = await http.post(path, content=asked, headers={"authorization": "Bearer secret"})
            assert (answer.status_code, answer.json()["type"]) == (400, "error")
        answer = await http.post("/v1/embeddings", json={})
        assert (answer.status_code, answer.json()["type"]) == (404, "error")
