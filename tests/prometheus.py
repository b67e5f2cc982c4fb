"""A real Prometheus that scrapes one address, if the machine has one."""

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.limits import end

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
_START_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Prometheus:
    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """Returns `data` of an HTTP API answer. Raises HTTPError for a query that it refuses."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def names(self) -> set[str]:
        """Returns the names of all scraped metrics."""
        return set(self.ask("label/__name__/values"))

    def target(self) -> dict[str, Any]:
        """Returns the state of the only scrape target; {} before the first scrape."""
        return next(iter(self.ask("targets")["activeTargets"]), {})

    def wait_until(self, health: str, *, timeout_s: float = 30.0) -> str:
        """Waits until the target's health is "up" or "down". Returns the scrape error."""
        deadline = time.monotonic() + timeout_s
        while self.target().get("health") != health:
            assert time.monotonic() < deadline, self.target()
            time.sleep(0.2)
        return self.target()["lastError"]


@contextmanager
def prometheus(folder: Path, *, target: str, port: int, **scrape: Any) -> Iterator[Prometheus]:
    """Scrapes `target` each second; listens on `port` of loopback. scrape: more settings of the scrape."""
    assert PROMETHEUS is not None
    folder.mkdir()
    job = {"job_name": "tasuki", "static_configs": [{"targets": [target]}], **scrape}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    argv = [
        PROMETHEUS,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    try:
        found = Prometheus(f"http://127.0.0.1:{port}")
        _wait_until_ready(found, process, folder / "log")
        yield found
    finally:
        end(process)


def _wait_until_ready(found: Prometheus, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(f"{found.url}/-/ready", timeout=1).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
