"""The gateway of a real node, asked by OpenAI's own client: turns, sessions, changeovers, and requests that are refused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI, BadRequestError

from tasuki.client import AsyncClient, Phase, TrainingSample
from tasuki.gateway.rollout import Rollout
from tasuki.gateway.server import gateway, serving
from tasuki.gateway.sessions import Sessions
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.address import unix_target
from tests.conftest import RunningNode
from tests.e2e.test_episodes import TEMPLATE
from tests.models import char_tokenizer

ASK: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 8, "temperature": 0}


@pytest.fixture
async def client(node: RunningNode) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(state_dir=node.state_dir) as client:
        await client.acquire(Phase.ROLLOUT)
        yield client


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = char_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return ModelTokenizer(folder)


@pytest.fixture
async def http(node: RunningNode, client: AsyncClient, tokenizer: ModelTokenizer) -> AsyncIterator[httpx.AsyncClient]:
    async with Rollout(unix_target(node.state_dir, service="coordinator"), decode=tokenizer.decode) as rollout:
        sessions = Sessions(rollout, tokenizer, model="model", key="secret")
        with socket.create_server(("127.0.0.1", 0)) as port:
            base = f"http://127.0.0.1:{port.getsockname()[1]}"
            async with (
                serving(gateway(sessions), port),
                httpx.AsyncClient(base_url=base, headers={"authorization": "Bearer secret"}, timeout=120) as http,
            ):
                yield http


async def test_answers_are_as_openai_gives_them_and_wrong_requests_are_named(http: httpx.AsyncClient):
    openai = AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key="secret", max_retries=0)
    assert (await openai.models.list()).data[0].id == "model"
    whole = await openai.chat.completions.create(**ASK, n=2, logprobs=True)
    first, second = whole.choices
    assert first.message == second.message
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 16
    assert first.logprobs is not None
    assert first.logprobs.content is not None
    assert len(first.logprobs.content) == whole.usage.completion_tokens // 2
    stream = await openai.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    events = [event async for event in stream]
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == first.message.content
    assert events[-2].choices[0].finish_reason == first.finish_reason
    assert events[-1].usage is not None
    assert events[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    with pytest.raises(BadRequestError, match="context"):
        await openai.chat.completions.create(**ASK | {"messages": [{"role": "user", "content": "a" * 5000}]})
    for change, param in (
        ({"n": 0}, "n"), ({"temperature": -1}, "temperature"), ({"max_tokens": "x"}, "max_tokens"), ({"best_of": 2}, "best_of"),
        ({"messages": "hi"}, "messages"), ({"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ({"tool_choice": "required"}, "tool_choice"), ({"stop": [3]}, "stop"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    ):  # fmt: skip
        answer = await http.post("/v1/chat/completions", json=ASK | change)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    for arguments, status in (
        ({"content": b"{"}, 400), ({"content": b"[]"}, 400), ({"content": b" " * (2**23 + 1)}, 413),
        ({"json": ASK, "headers": {"authorization": "Bearer other"}}, 401),
    ):  # fmt: skip
        assert (await http.post("/v1/chat/completions", **arguments)).status_code == status
    asked = {
        "token_ids": [20, 21],
        "sampling_params": {"max_tokens": 4, "temperature": 0, "logprobs": 1, "skip_special_tokens": False},
    }
    (choice,) = (await http.post("/inference/v1/generate", json=asked)).json()["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [f"token_id:{one}" for one in choice["token_ids"]]


async def test_an_answer_goes_on_after_changeovers(client: AsyncClient, http: httpx.AsyncClient):
    ask = {**ASK, "max_tokens": 64}
    undisturbed = (await http.post("/v1/chat/completions", json=ask)).json()
    await client.acquire(Phase.TRAIN)
    waiting = asyncio.create_task(http.post("/sessions/a/v1/chat/completions", json=ask))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    for phase in (Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT, Phase.TRAIN, Phase.ROLLOUT):
        await client.acquire(phase)
    answer = (await waiting).json()
    assert [answer[name] for name in ("choices", "usage")] == [undisturbed[name] for name in ("choices", "usage")]


async def test_a_session_gives_samples_that_the_trainer_takes(
    client: AsyncClient, http: httpx.AsyncClient, tokenizer: ModelTokenizer
):
    made = (await http.post("/sessions", json={})).json()
    own = {"authorization": f"Bearer {made['api_key']}"}
    openai = AsyncOpenAI(base_url=f"{http.base_url}/v1", api_key=made["api_key"], max_retries=0)
    messages: list[Any] = [{"role": "user", "content": "ab"}]
    for _ in range(3):
        reply = await openai.chat.completions.create(model="any", messages=messages, max_tokens=6, stop=["e", "\n"])
        messages += [reply.choices[0].message, {"role": "user", "content": "more"}]
    messages[0] = {"role": "user", "content": "rewritten"}
    await openai.chat.completions.create(model="any", messages=messages, max_tokens=6)
    path = f"/sessions/{made['session_id']}"
    for wrong in (True, "1", None, 1e39):
        assert (await http.post(f"{path}/reward", json={"reward": wrong}, headers=own)).status_code == 400
    assert (await http.post(f"{path}/reward", json={"reward": 0.5}, headers=own)).status_code == 204
    given = (await http.get(f"{path}/samples", headers=own)).json()
    assert given["reward"] == 0.5
    samples = [
        TrainingSample(**{name: value for name, value in one.items() if name != "version_spans"}) for one in given["samples"]
    ]
    assert len(samples) == 2
    assert samples[0].prompt_token_ids == tokenizer.encode_prompt([{"role": "user", "content": "ab"}])
    scored = await client.compute_log_probs(samples)
    await client.acquire(Phase.ROLLOUT)
    for sample, row in zip(samples, scored, strict=True):
        drawn = np.asarray(sample.loss_mask) > 0
        assert np.abs(row - np.asarray(sample.rollout_log_probs))[drawn].max() < 0.1  # both in bfloat16
    other = (await http.post("/sessions", json={})).json()
    assert (await http.get(f"/sessions/{other['session_id']}/samples", headers=own)).status_code == 401
    assert (await http.post("/sessions", json={}, headers=own)).status_code == 401
    assert (await http.delete(path, headers=own)).status_code == 204
    assert (await http.get(f"{path}/samples")).status_code == 404


async def test_a_client_that_leaves_frees_its_request(client: AsyncClient, http: httpx.AsyncClient):
    ask = {"token_ids": [20], "sampling_params": {"ignore_eos": True, "max_tokens": 400}}
    with pytest.raises(httpx.ReadTimeout):
        await http.post("/inference/v1/generate", json=ask, timeout=0.3)
    async with asyncio.timeout(30):
        while (await client.rollout_state()).num_running:
            await asyncio.sleep(0.05)
