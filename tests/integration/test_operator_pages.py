"""Commands of docs/dashboard.md, metrics.md and tracing.md, run as written, with free ports and this machine's name."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tasuki.cli.__main__ import INTERRUPTED
from tasuki.config.places import socket_dir
from tests.conftest import ENVIRONMENT, ROOT
from tests.dashboard import RECORDED
from tests.integration.coordinator_process import running_coordinator
from tests.integration.port_node import make_certs, mtls
from tests.integration.test_grpcurl import PATH
from tests.integration.test_metrics_port import config_of, served
from tests.integration.test_tracing import traced_node
from tests.otlp import receiving
from tests.ports import free_port

_PATH = f"{Path(sys.executable).parent}{os.pathsep}{PATH}"
_TRACE = "0af7651916cd43dd8448eb211c80319c"


def commands(page: str, *, containing: str) -> list[str]:
    """Returns commands from the page's blocks, with continued lines joined."""
    blocks = re.findall(r"^ *```(?:sh|text)\n(.*?)^ *```", (ROOT / "docs" / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines() if containing in line]
    assert lines
    return lines


def needs(tool: str) -> None:
    if shutil.which(tool, path=_PATH) is None:
        pytest.skip(f"{tool} is not installed")


async def run(line: str, folder: Path, **variables: str) -> str:
    process = await asyncio.create_subprocess_exec(
        "bash", "-o", "pipefail", "-c", line, cwd=folder, env={**ENVIRONMENT, "PATH": _PATH, **variables}, stdout=-1, stderr=-2
    )
    output, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, f"{line}\n{output.decode()}"
    return output.decode()


def targets_of(url: str, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
    """Returns the targets of a starting Prometheus, once it has some."""
    deadline = time.monotonic() + 60
    while True:
        with suppress(OSError), urllib.request.urlopen(f"{url}/api/v1/targets", timeout=5) as answer:
            if targets := json.load(answer)["data"]["activeTargets"]:
                return targets
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with everything that the pages name: a node's file, its folder, its run and a lab."""
    for name in ("node", "runs/demo"):
        shutil.copytree(RECORDED, tmp_path / name)
    make_certs(tmp_path / "lab")
    lab = "".join(
        f'{key} = "lab/{name}"\n' for key, name in (("cert", "node.pem"), ("key", "node.key"), ("client_ca", "ca.pem"))
    )
    (tmp_path / "node.toml").write_text(f'state_dir = "node"\n[model]\npath = "model"\n[security]\n{lab}')
    return tmp_path


def status(url: str, *, lab: Path) -> int:
    """Returns the page's HTTP status for a viewer."""
    tls = ssl.create_default_context(cafile=lab / "ca.pem")
    tls.load_cert_chain(lab / "viewer.pem", lab / "viewer.key")
    with urllib.request.urlopen(url, timeout=30, context=tls if url.startswith("https") else None) as answer:
        return answer.status


@pytest.mark.parametrize("number", range(4))
def test_each_dashboard_of_the_page_shows_itself(number: int, folder: Path) -> None:
    lines = commands("dashboard.md", containing="tasuki dashboard")
    assert len(lines) == 4
    line, port = lines[number], free_port()
    line = line.replace(":8765", f":{port}") if "--listen" in line else f"{line} --listen 127.0.0.1:{port}"
    # Replaces ssh: the other machine is this one, and its command runs here.
    ssh = folder / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/sh\n[ "$1" = -L ] && shift 3 && exec "$@"\n')
    ssh.chmod(0o755)
    environment = {**ENVIRONMENT, "PATH": f"{ssh.parent}{os.pathsep}{_PATH}"}
    with subprocess.Popen(
        ["bash", "-c", f"exec {line}"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    ) as shown:
        assert shown.stdout is not None
        url = shown.stdout.readline().strip()
        assert url.startswith("https://localhost:" if "0.0.0.0" in line else "http://127.0.0.1:"), url
        assert status(url.partition("#")[0], lab=folder / "lab") == 200
        shown.send_signal(signal.SIGINT)
        assert shown.wait(60) == INTERRUPTED


def test_certificate_for_a_browser_holds_the_viewers_key(folder: Path) -> None:
    needs("openssl")
    (line,) = commands("dashboard.md", containing="openssl pkcs12")
    # Without a terminal, openssl reads the password from its input.
    given = {"cwd": folder, "text": True, "timeout": 60, "start_new_session": True, "capture_output": True}
    made = subprocess.run(["bash", "-c", line], input="s3cret\ns3cret\n", check=False, **given)
    assert made.returncode == 0, made.stderr
    read = ["openssl", "pkcs12", "-in", "viewer.p12", "-nodes", "-passin", "pass:s3cret"]
    assert "BEGIN PRIVATE KEY" in subprocess.run(read, check=True, **given).stdout


async def test_curl_of_the_metrics_page_works(tmp_path: Path) -> None:
    needs("curl")
    (line,) = commands("metrics.md", containing="curl -s")
    port = free_port()
    async with running_coordinator(tmp_path, metrics_port=port):
        assert 'tasuki_phase{phase="TRAIN"} 1' in await run(line.replace(":9464", f":{port}"), tmp_path)


def test_prometheus_of_the_metrics_page_starts_and_scrapes_the_nodes_address(tmp_path: Path) -> None:
    needs("prometheus")
    (line,) = commands("metrics.md", containing="prometheus --config.file")
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    port = free_port()
    with subprocess.Popen(
        ["bash", "-c", f"exec {line} --web.listen-address=127.0.0.1:{port}"],
        cwd=tmp_path,
        env={**ENVIRONMENT, "PATH": _PATH},
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            (target,) = targets_of(f"http://127.0.0.1:{port}", process)
            assert target["scrapeUrl"] == "http://127.0.0.1:9464/metrics"
        finally:
            process.terminate()


async def test_curl_of_the_metrics_page_works_over_tls(folder: Path) -> None:
    needs("curl")
    (line,) = commands("metrics.md", containing="curl --cacert")
    port = free_port()
    async with served(config_of(folder, port, *mtls(folder / "lab"), host="0.0.0.0")):
        assert "tasuki_phase 1" in await run(line.replace("node-a:9464", f"localhost:{port}"), folder)


async def test_grpcurl_of_the_tracing_page_continues_its_trace(tmp_path: Path) -> None:
    needs("grpcurl")
    (line,) = commands("tracing.md", containing="grpcurl")
    with receiving() as receiver:
        async with traced_node(tmp_path, receiver.endpoint) as node:
            (tmp_path / "run").symlink_to(socket_dir(node.config.state_dir))  # a short path
            await run(line, tmp_path)
        assert receiver.one("changeover to ROLLOUT").trace_id == _TRACE


async def test_file_of_headers_of_the_tracing_page_is_private(folder: Path) -> None:
    (line,) = commands("tracing.md", containing="otlp.headers)")
    await run(line, folder, OTLP_TOKEN="s3cret")
    headers = folder / "lab" / "otlp.headers"
    assert headers.read_text() == "authorization: Bearer s3cret\n"
    assert headers.stat().st_mode & 0o777 == 0o600
