"""The dashboard's server: readers' access, the paths a request can name, and clients that cannot block it."""

import http.client
import json
import random
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from tasuki.cli.__main__ import main
from tests.dashboard import RECORDED, ask, get, served, token_of
from tests.integration.mutations import mutated
from tests.integration.port_node import admit_tokens, make_certs, make_tokens, mtls, port_config, tokens
from tests.integration.test_metrics_port import tls_of
from tests.limits import wait_for

FIGURES = ["run", "node", "curves", "memory", "changeovers", "settings", "log", "samples",
           "samples/step?step=29", "samples/one?step=29&index=0", "changes"]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    with served(RECORDED) as server:
        yield server


@pytest.mark.parametrize("path", FIGURES)
def test_figures_are_for_whoever_has_the_token_of_the_url(server, path: str) -> None:
    for token in (None, "", "0" * 43, token_of(server)[:-1]):
        status, _, body = get(server, f"/api/{path}", token=token)
        assert status == 401 and "tasuki dashboard" in json.loads(body)["error"]
    assert get(server, f"/api/{path}", token=token_of(server))[0] == 200


def test_every_answer_forbids_scripts_from_elsewhere_and_frames(server) -> None:
    for path in ("/", "/app.js", "/style.css", "/api/run", "/nothing"):
        _, headers, _ = get(server, path, token=token_of(server))
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")
        assert headers["Access-Control-Allow-Origin"] is None


def test_a_name_that_was_made_to_lead_here_is_refused(server) -> None:
    port = server.server_address[1]
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1.evil.example",
        "[::2]",
        "",
        "localhost.",
        f"10.0.0.1:{port}",
    ):
        assert get(server, "/", host=host)[0] == 421
        assert get(server, "/api/run", host=host, token=token_of(server))[0] == 421
    for host in ("localhost", f"localhost:{port}", "127.0.0.1:9", "[::1]:80"):
        assert get(server, "/", host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/../__init__.py", "/static/app.js", "/%2e%2e/server.py", "//etc/passwd", "/..%2f..%2fnode.toml", "/app.js/", "/api", "/api/../app.js",
     "/api/samples/step?step=../../secret", "/api/samples/step?step=-1", "/api/samples/step", "/api/samples/one?step=29&index=99999",
     "/api/samples/one?step=7&index=0", "/api/curves?points=1e9", "/api/curves?points=999999", "/api/changeovers?before=x",
     "/api/changeovers?limit=0", "/api/memory?changeovers=99999999999999999999"],
)  # fmt: skip
def test_a_path_names_only_what_is_served(server, path: str) -> None:
    status, _, body = get(server, path, token=token_of(server))
    assert status in (400, 404)
    assert b"Traceback" not in body


def test_a_head_has_no_body_and_needs_the_token(server) -> None:
    for headers, status in (({}, 401), ({"Authorization": f"Bearer {token_of(server)}"}, 200)):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        connection.request("HEAD", "/api/run", headers=headers)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, b"")
        assert int(answer.headers["Content-Length"]) > 0


def test_mutated_requests_break_nothing_and_write_nothing(server, capfd: pytest.CaptureFixture[str]) -> None:
    randomness = random.Random(1)
    request = (
        f"GET /api/samples/one?step=29&index=0 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token_of(server)}\r\n\r\n"
    )
    answered = 0
    for _ in range(300):
        connection = socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10)
        with connection, suppress(OSError):  # the server may close early
            connection.sendall(mutated(randomness, request.encode()))
            connection.shutdown(socket.SHUT_WR)
            answered += bool(connection.recv(100))
    assert answered > 100
    assert ask(server, "/api/run")["steps"] == [0, 30]
    assert capfd.readouterr().err == ""


def test_what_has_changed_is_counted(tmp_path: Path) -> None:
    shutil.copytree(RECORDED, tmp_path / "run")
    with served(tmp_path / "run") as server:
        wait_for(lambda: ask(server, "/api/run")["steps"] == [0, 30])
        before = ask(server, "/api/changes")
        with (tmp_path / "run" / "metrics.jsonl").open("a") as lines:
            lines.write('{"step": 31, "mean_reward": 0.5}\n')
        wait_for(lambda: ask(server, "/api/changes")["steps"] > before["steps"])
        wait_for(lambda: ask(server, "/api/run")["steps"] == [0, 31])


def test_beyond_loopback_the_nodes_tokens_let_in(tmp_path: Path) -> None:
    folder = make_tokens(make_certs(tmp_path / "certs"))
    config = port_config(tmp_path, *mtls(folder)[:2], *tokens(folder))
    with served(RECORDED, config=config, host="0.0.0.0") as server:
        token = (folder / "viewer.token").read_text().strip()
        assert get(server, "/api/run", tls=tls_of(folder), token=token)[0] == 200
        assert get(server, "/api/run", tls=tls_of(folder), token="0" * 64)[0] == 401
        admit_tokens(folder, viewer="1" * 64)
        assert get(server, "/api/run", tls=tls_of(folder), token=token)[0] == 401


@pytest.mark.parametrize(
    ("arguments", "reason", "words"),
    [
        (["{run}", "--listen", "0.0.0.0:8765"], "INVALID_ARGUMENT", "--config of a node with [security]"),
        (["--config", "{config}", "--listen", "0.0.0.0:8765"], "INVALID_ARGUMENT", "security.client_ca or security.callers"),
        (["{run}", "--listen", "8765"], "INVALID_ARGUMENT", "must be HOST:PORT"),
        (["{run}", "--listen", "127.0.0.1:{port}"], "INVALID_ARGUMENT", "in use; give another address by --listen"),
        (["{run}/nothing"], "PATH_NOT_FOUND", "there is no folder"),
        (["{run}", "{run}", "{run}/nothing"], "PATH_NOT_FOUND", "there is no folder"),
        (["--compare", "{run}", "{run}/nothing"], "PATH_NOT_FOUND", "there is no folder"),
        (["{run}", "--compare", "{config}"], "PATH_NOT_FOUND", "there is no folder"),
        ([], "INVALID_ARGUMENT", "give a run's output folder"),
    ],
)
def test_what_must_not_be_served_is_refused_at_start(
    arguments: list[str], reason: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "node.toml"
    config.write_text('state_dir = "state"\n[model]\npath = "model"\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"run": RECORDED, "config": config, "port": taken.getsockname()[1]}
        assert main(["dashboard", *(one.format(**names) for one in arguments)]) == 2
    told = capsys.readouterr().err
    assert reason in told and words in told
