"""Example of a reward model behind HTTP, in real workers with a real server on loopback."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tasuki.client.rewards import RewardPool
from tasuki.wire.errors import RewardFailed

EXAMPLES = Path(__file__).parents[2] / "client" / "examples"


class RewardServer(ThreadingHTTPServer):
    """Rewards a completion by its length; some completions trigger misbehaviour."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.num_posts: Counter[str] = Counter()
        self.prompts: list[object] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}/reward"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server = self.server
        assert isinstance(server, RewardServer)
        posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        completion = posted["completion"]
        server.num_posts[completion] += 1
        server.prompts.append(posted["prompt"])
        is_first = server.num_posts[completion] == 1
        answer = json.dumps({"reward": len(completion)}).encode()
        match completion:
            case "busy at first" if is_first:
                self.send_error(503)
            case "slow at first" if is_first:
                time.sleep(3)
            case "cut off at first" if is_first:
                self.send_response(200)
                self.send_header("Content-Length", "100")
                self.end_headers()
                self.wfile.write(answer)
            case "busy":
                self.send_error(503)
            case "refused":
                self.send_error(404)
            case "odd":
                self._answer(b'{"score": 1}')
            case _:
                self._answer(answer)

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """Keeps the test's output clean."""


@pytest.fixture
def server() -> Iterator[RewardServer]:
    with RewardServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_reward_comes_from_the_server_that_the_environment_names(server: RewardServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TASUKI_REWARD_URL", server.url)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    chat = [{"role": "user", "content": "hi"}]
    with RewardPool("http_reward:reward", folders=[EXAMPLES]) as pool:
        scores = pool.score([{"prompt": "p", "answer": "unused"}, {"prompt": chat}], ["abc", "defgh"])
    assert scores.rewards.tolist() == [3, 5]
    assert server.prompts == ["p", chat]


def test_the_row_names_the_server_and_what_passes_is_tried_again(server: RewardServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TASUKI_REWARD_URL", "http://127.0.0.1:1")
    completions = ["busy at first", "slow at first", "cut off at first"]
    with RewardPool("http_reward:reward", folders=[EXAMPLES], num_workers=2) as pool:
        scores = pool.score([{"prompt": "p", "reward_url": server.url}] * 3, completions)
    assert scores.rewards.tolist() == [len(completion) for completion in completions]
    assert set(server.num_posts.values()) == {2}


@pytest.mark.parametrize(
    ("completion", "num_posts", "cause"),
    [
        ("busy", 3, "gave no reward in 3 attempts; the last: 503"),
        ("refused", 1, "answered 404"),
        ("odd", 1, 'expected {"reward": number}, got b\'{"score": 1}\''),
    ],
)
def test_attempts_are_bounded_and_the_cause_is_told(server: RewardServer, completion: str, num_posts: int, cause: str):
    with RewardPool("http_reward:reward", folders=[EXAMPLES]) as pool, pytest.raises(RewardFailed) as raised:
        pool.score([{"prompt": "p", "reward_url": server.url}], [completion])
    assert cause in raised.value.message
    assert server.num_posts[completion] == num_posts
