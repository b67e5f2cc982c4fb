"""The gateway of a real node, asked by OpenAI's own client: turns, sessions, changeovers, and requests that are refused."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tasuki.client import AsyncClient, Client, Phase, SamplingParams, TrainingSample
from tasuki.client.dataset import Row
from tasuki.client.episode import Episodes
from tasuki.client.episodes import EpisodePool
from tasuki.gateway.rollout import Rollout
from tasuki.gateway.server import Sessions, gateway, serving
from tasuki.runs.tokenizer import ModelTokenizer
from tasuki.wire.address import unix_target
from tasuki.wire.errors import RewardFailed
from tests.conftest import ROOT, RunningNode
from tests.e2e.test_episodes import TEMPLATE
from tests.models import char_tokenizer

AGENT = """
import json, sys
from openai import OpenAI
row, client, messages = json.load(sys.stdin), OpenAI(), []
for _ in range(3):
    messages.append({"role": "user", "content": row["prompt"]})
    reply = client.chat.completions.create(model="gpt-4o", messages=messages, temperature=0.2, max_tokens=4)
    messages.append(reply.choices[0].message)
print("an agent's own output")
print(len(messages))
"""
WAYS = """
import json, os, socket, subprocess, sys, time, urllib.error, urllib.request
row = json.load(sys.stdin)
def post(url, fields, key=os.environ["OPENAI_API_KEY"]):
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(fields).encode(), headers)).read()
def chat(**fields):
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"messages": [{"role": "user", "content": "a"}], **fields})
match row["prompt"]:
    case "posts":
        chat(max_tokens=2)
        post(os.environ["TASUKI_SESSION_URL"] + "/reward", {"reward": 0.25})
    case "leaves":
        subprocess.Popen(["sleep", "600"])
        print(2.0)
    case "leaves a daemon":
        subprocess.Popen(["sleep", "120"], start_new_session=True)  # it keeps the pipes
        print(2.5)
    case "floods": print("x" * 5_000_000 + chr(10) + "3.0")
    case "text": print("great")
    case "silent": pass
    case "fails": sys.exit("no luck")
    case "breaks off":
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0]))) as breaks:
                path, key = os.environ["OPENAI_BASE_URL"].split("/", 3)[3], os.environ["OPENAI_API_KEY"]
                body = json.dumps({"messages": [{"role": "user", "content": "a"}]})
                head = f"POST /{path}/chat/completions HTTP/1.1\\r\\nhost: a\\r\\nauthorization: Bearer {key}\\r\\n"
                breaks.sendall(f"{head}content-length: {len(body)}\\r\\n\\r\\n{body}".encode())
            time.sleep(0.5)
        chat(max_tokens=2)
        print(5.0)
    case "hangs": time.sleep(600)
    case "asks wrongly":
        deep = []
        for _ in range(700): deep = [deep]
        for call in (lambda: chat(n=0), lambda: chat(response_format={"type": "json_schema", "json_schema": {"schema": {}}}),
                     lambda: chat(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": deep}}}]}]),
                     lambda: post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {}, key="other")):
            try: call()
            except urllib.error.HTTPError as error: print(error.code)
        print(4.0)
"""
SERVER = """
import json, threading, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Run(BaseHTTPRequestHandler):
    def do_POST(self):
        row = json.loads(self.rfile.read(int(self.headers["content-length"])))
        policy = row["policy"]
        if row["prompt"] == "fails":
            self.send_error(500, "no luck")
            return
        headers = {"authorization": "Bearer " + policy["openai_api_key"], "content-type": "application/json"}
        asked = {"messages": [{"role": "user", "content": row["prompt"]}]}
        asked = urllib.request.Request(policy["openai_base_url"] + "/chat/completions", json.dumps(asked).encode(), headers)
        usage = json.loads(urllib.request.urlopen(asked).read())["usage"]
        answer = {"reward": usage["completion_tokens"]} if row["prompt"] == "ab" else {}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Run)
print(server.server_port, flush=True)
server.serve_forever()
"""
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
    async with Rollout(unix_target(node.state_dir, service="coordinator"), decode=tokenizer.decode_whole) as rollout:
        sessions = Sessions(rollout, tokenizer, model="model", key="secret")
        with socket.create_server(("127.0.0.1", 0)) as port:
            base = f"http://127.0.0.1:{port.getsockname()[1]}"
            async with (
                serving(gateway(sessions), port),
                httpx.AsyncClient(base_url=base, headers={"authorization": "Bearer secret"}, timeout=120) as http,
            ):
                yield http


async def test_answers_are_as_openai_gives_them_and_wrong_requests_are_named(http: httpx.AsyncClient):
    from anthropic import AsyncAnthropic  # takes a second, so only where it runs
    from openai import AsyncOpenAI, BadRequestError

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
    anthropic = AsyncAnthropic(base_url=str(http.base_url), api_key="secret", max_retries=0)
    same: dict[str, Any] = {"model": "any", "messages": ASK["messages"], "max_tokens": 8, "extra_body": {"temperature": 0}}
    message = await anthropic.messages.create(**same)
    assert [block.text for block in message.content] == [first.message.content]
    async with anthropic.messages.stream(**same) as streamed:
        assert [text async for text in streamed.text_stream] == [first.message.content]
        assert (await streamed.get_final_message()).stop_reason == message.stop_reason
    response = await openai.responses.create(model="any", input="ab", max_output_tokens=8, temperature=0)
    assert (response.output_text, response.status) == (first.message.content, "incomplete")
    replay: Any = await openai.responses.create(model="any", input="ab", max_output_tokens=8, temperature=0, stream=True)
    told = [event async for event in replay]
    assert [event.delta for event in told if event.type == "response.output_text.delta"] == [first.message.content]
    assert (told[-1].type, told[-1].response.output_text) == ("response.incomplete", first.message.content)
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


async def cut_twice(client: AsyncClient, http: httpx.AsyncClient, ask: dict[str, Any]) -> asyncio.Task[httpx.Response]:
    """A request that two changeovers have cut. On a busy machine some are answered before: then another is made."""
    for _ in range(20):
        await client.acquire(Phase.TRAIN)
        waiting = asyncio.create_task(http.post("/sessions/a/inference/v1/generate", json=ask))
        for _ in range(2):
            await client.acquire(Phase.ROLLOUT)
            async with asyncio.timeout(30):
                while not (waiting.done() or (await client.rollout_state()).num_running):
                    await asyncio.sleep(0.01)
            await client.acquire(Phase.TRAIN)
        if not waiting.done():
            return waiting
    raise AssertionError("20 requests were answered before their second changeover")


async def test_an_answer_waits_for_the_policy_and_goes_on_after_changeovers(client: AsyncClient, http: httpx.AsyncClient):
    ask = {"token_ids": [20, 21], "sampling_params": {"max_tokens": 200, "ignore_eos": True}}
    waiting = await cut_twice(client, http, ask)
    await client.acquire(Phase.ROLLOUT)
    (choice,) = (await waiting).json()["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (200, "length")
    sample = TrainingSample([20, 21], choice["token_ids"])
    (scored,) = await client.compute_log_probs([sample])
    drawn = np.array([one["logprob"] for one in choice["logprobs"]["content"]])
    assert np.abs(scored - drawn).max() < 0.1  # both in bfloat16: each token has the prefix it was drawn from


async def test_a_session_gives_samples_that_the_trainer_takes(
    client: AsyncClient, http: httpx.AsyncClient, tokenizer: ModelTokenizer
):
    from openai import AsyncOpenAI

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
        TrainingSample(**{name: one[name] for name in one if name not in ("version_spans", "has_exact_log_probs")})
        for one in given["samples"]
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


@pytest.fixture
def pool_of(node: RunningNode, tokenizer: ModelTokenizer, tmp_path: Path) -> Callable[..., Episodes]:
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "ways.py").write_text(WAYS)

    def run(program: str, prompts: Sequence[str], runs: str = "run_program", num_tokens: int = 6, **settings: Any) -> Episodes:
        command = [sys.executable, program]
        options = {"command": command, "tokenizer": tokenizer, "max_tokens": 96, "folders": [tmp_path], **settings}
        with Client(state_dir=node.state_dir) as client, EpisodePool(f"tasuki.gateway.program:{runs}", **options) as pool:
            rows: list[Row] = [{"prompt": prompt, "command": "of the row", "policy": "of the row"} for prompt in prompts]
            pool.check_rows(rows, path="rows.jsonl")
            sampling = SamplingParams(max_new_tokens=num_tokens, temperature=1.0, ignore_eos=num_tokens > 6)
            return pool.run(client, rows, sampling, num_samples=2, number=5)

    return run


def test_an_agent_on_openais_sdk_is_an_episode(pool_of: Callable[..., Episodes]):
    ran = pool_of("agent.py", ["ab"], timeout_s=120.0)
    assert ran.scores.rewards.tolist() == [6.0, 6.0], [one.failure for one in ran.episodes]
    for episode in ran.episodes:
        (sample,) = episode.training_samples()
        lengths = [len(turn.sample.token_ids) for turn in episode.turns.turns]
        assert len(lengths) == 3
        assert np.sum(sample.loss_mask) == sum(lengths) <= 12
        assert sample.temperature == 1.0  # the run's


def test_programs_give_rewards_and_fail_alone(pool_of: Callable[..., Episodes]):
    ways = ["posts", "leaves", "leaves a daemon", "floods", "asks wrongly", "text", "silent", "fails"]
    ran = pool_of("ways.py", ways, timeout_s=120.0, on_error="skip")
    failures = {str(one.row["prompt"]): one.failure for one in ran.episodes}
    assert [failures.pop(way) for way in ways[:5]] == [""] * 5, failures
    assert ran.scores.rewards.tolist()[:10] == [0.25, 0.25, 2.0, 2.0, 2.5, 2.5, 3.0, 3.0, 4.0, 4.0]
    assert [len(one.turns.turns) for one in ran.episodes][:4] == [1, 1, 0, 0]
    assert np.isnan(ran.scores.rewards[10:]).all()
    assert "no reward: 'great'" in failures["text"]
    assert "no reward: ''" in failures["silent"]
    assert "ended with code 1: no luck" in failures["fails"]
    (hangs, _) = pool_of("ways.py", ["hangs"], timeout_s=1.0, on_error="skip").episodes
    assert "1 s of its own time" in hangs.failure


def test_a_task_in_harbors_form_is_judged_by_its_tests(pool_of: Callable[..., Episodes], tmp_path: Path):
    program = (ROOT / "client/examples/agent/harbor.py").read_text()
    (tmp_path / "harbor.py").write_text(program.replace('["task"]', '["prompt"]'))
    tests = {
        "by_reward": "wc -m < answer.txt > $LOGS/reward.txt; exit 1",
        "passes": "test -s answer.txt",
        "fails": "test -d answer.txt",
    }
    for name, judges in tests.items():
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "task.toml").write_text("[agent]\ntimeout_sec = 100.0\n[verifier]\ntimeout_sec = 100.0\n")
        (tmp_path / name / "instruction.md").write_text("ab")
        (tmp_path / name / "tests" / "test.sh").write_text(judges)
    ran = pool_of("harbor.py", [str(tmp_path / name) for name in tests], timeout_s=120.0)
    tokenizer = char_tokenizer()
    drawn = [tokenizer.decode(one.turns.turns[0].sample.token_ids, skip_special_tokens=True) for one in ran.episodes]
    rewards = [float(len(text)) for text in drawn[:2]] + [float(bool(text)) for text in drawn[2:4]] + [0.0, 0.0]
    assert ran.scores.rewards.tolist() == rewards
    assert len(set(rewards)) > 1


def test_programs_that_cannot_run_are_refused(pool_of: Callable[..., Episodes]):
    with pytest.raises(RewardFailed, match=r"no-such-program agent.py failed for sample 0 .*No such file"):
        pool_of("agent.py", ["ab"], command=["no-such-program", "agent.py"])


def test_a_server_runs_episodes(pool_of: Callable[..., Episodes]):
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/run"
        try:
            prompts = ["ab", "fails", "tells nothing"]
            ran = pool_of("", prompts, runs="run_on_server", command=[url], on_error="skip")
        finally:
            server.kill()
    assert [len(one.turns.turns) for one in ran.episodes] == [1, 1, 0, 0, 1, 1]
    drawn = [len(one.turns.turns[0].sample.token_ids) for one in ran.episodes[:2]]
    assert ran.scores.rewards.tolist()[:2] == drawn
    assert "500 no luck" in ran.episodes[2].failure
    assert "KeyError" in ran.episodes[4].failure


def test_requests_that_a_program_breaks_off_are_no_turns(pool_of: Callable[..., Episodes]):
    (episode, *_) = pool_of("ways.py", ["breaks off"], num_tokens=80, timeout_s=60.0, max_turns=2).episodes
    assert (episode.reward, len(episode.turns.turns), episode.turns.is_truncated) == (5.0, 1, False)
