"""The dashboard on a damaged or hostile folder: it shows the rest of the run, and names the file that cannot be read."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.dashboard.feed import Feed
from tasuki.dashboard.places import place_of
from tasuki.wire.errors import InvalidArgument
from tests.dashboard import RECORDED
from tests.limits import limit_s

pytestmark = pytest.mark.timeout(20)


def replace(path: Path, kind: str) -> None:
    """Replaces a file by something that is not a regular file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "socket":
            with closing(socket.socket(socket.AF_UNIX)) as server:
                server.bind(os.path.relpath(path))


def look(feed: Feed) -> None:
    """Reads everything available, as the feed's thread does."""
    while feed._look():
        pass


def ask_all(feed: Feed) -> None:
    """Makes every request of the pages."""
    told = [
        feed.settings(),
        feed.log(only_warnings=False),
        feed.run(),
        feed.node(),
        feed.curves(first=0, last=9, points=10),
        feed.memory(changeovers=10),
    ]
    step = feed.sample_steps()["steps"][0]
    assert json.dumps([*told, feed.samples(step), feed.sample(step, 0)], allow_nan=False)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket"])
def test_what_is_no_file_is_named_and_the_rest_is_shown(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    folder = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    names = ["state_dir", "journal.sqlite", "logs/supervisor.log", "memory.jsonl", "model/tokenizer.json", "summary.json"]
    for name in names:
        replace(folder / name, kind)
    feed = Feed(lambda: place_of(folder))
    look(feed)
    ask_all(feed)
    look(feed)
    assert feed.run()["problems"] == [f"{folder / name} cannot be read: is not a regular file" for name in names]
    assert feed.run()["steps"] == (0, 30) and feed.sample_steps()["steps"] == [0, 2, 4, 8, 16, 29]
    replace(folder / "metrics.jsonl", kind)
    replace(folder / "samples/step-000000.jsonl", kind)
    look(feed)
    assert f"{folder / 'metrics.jsonl'} cannot be read: is not a regular file" in feed.run()["problems"]
    with pytest.raises(InvalidArgument, match=r"step-000000.jsonl cannot be read: is not a regular file"):
        feed.samples(0)


def tags(*devices: str, mapped_bytes: int = 1) -> str:
    """Returns a line of memory.jsonl."""
    fields = {"service": "trainer", "tag": "weights", "mapped_bytes": mapped_bytes, "total_bytes": 1, "stays": False}
    return json.dumps({"time": 1e9, "tags": [{**fields, "device": device} for device in devices], "device_bytes": {}})


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("state_dir", b"/" + b"a" * 5000, "File name too long"),
        ("state_dir", b"/x\0y\n", "contains no path"),
        ("state_dir", b"/\xff\xfe\n", None),
        ("summary.json", b"[" * 100_000, "it is not JSON"),
        ("summary.json", b" " * 2_000_000, "is larger than"),
        ("metrics.jsonl", b'{"step": 1, "metrics": ' + b"[" * 100_000 + b"\n", None),
        ("metrics.jsonl", b'{"step": 1, "metrics": {"\\ud800": -1e308, "%s": 1, "<b>": 1e308}}\n' % (b"n" * 1000), None),
        ("logs/supervisor.log", b"9999-99-99 99:99:99,000 INFO x event=restart service=coordinator\n", None),
        ("logs/supervisor.log", b"2026-11-23 09:00:00,000 INFO x event=restart " + b"a" * 1_900_000, None),
        ("progress.json", b'{"activity": "a", "eta_s": NaN}', None),
        ("progress.json", b"[" * 100_000, None),
        ("run.json", b'{"id": 1, "policy_version": 1e400, "recipe": {"a": "sha256:"}, "provenance": {"a": [Infinity]}}', None),
        ("run.json", b"[" * 100_000, None),
        ("logs/trainer.log", b"9999-99-99 99:99:99,000 ERROR \xff" + b"a" * 1_900_000 + b"\nx", None),
        ("logs/node.toml", b"a = " + b"[" * 100_000, None),
        ("logs/node.toml", b" " * 5_000_000, None),
        ("memory.jsonl", tags("cuda:0", mapped_bytes=10**400).encode(), None),
        ("memory.jsonl", tags(*map(str, range(1000))).encode(), None),
        ("memory.jsonl", b'{"time": NaN, "tags": [], "device_bytes": {}}\n', None),
        ("model/tokenizer.json", b'{"decoder": ' + b'{"decoders": [' * 90_000, "RecursionError"),
        ("model/tokenizer.json", b'{"model": {"vocab": {"a": Infinity}}}', "OverflowError"),
        ("samples/step-000000.jsonl", json.dumps({"token_ids": [10**30, True], "rewards": {"\ud800": 1}}).encode() + b"\n", None),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)  # fmt: skip
def test_any_content_is_survived_and_told(tmp_path: Path, name: str, content: bytes, problem: str | None) -> None:
    folder = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    (folder / name).write_bytes(content)
    started = time.process_time()
    feed = Feed(lambda: place_of(folder))
    look(feed)
    ask_all(feed)
    look(feed)
    problems = feed.run()["problems"]
    if problem is None:
        assert problems == []
    else:
        assert re.fullmatch(rf"/.*/{name.rpartition('/')[2]} cannot be read: .*{problem}.*", *problems)
    assert json.dumps(feed.run(), allow_nan=False).isascii()
    assert time.process_time() - started < limit_s(5.0)
