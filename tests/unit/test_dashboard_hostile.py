"""The dashboard on a damaged folder: it shows the rest of the run, and names the file that cannot be read."""

import json
import os
import re
import shutil
import socket
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.dashboard.feed import Feed
from tasuki.dashboard.places import place_of
from tasuki.dashboard.samples import list_steps, read_step
from tasuki.dashboard.server import figures, json_of
from tasuki.wire.errors import InvalidArgument
from tests.dashboard import RECORDED

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
    told = [figures(feed, f"/api/{name}", {}) for name in ("settings", "log", "run", "node", "curves", "memory", "samples")]
    query = {"step": str(told[-1]["steps"][0]), "index": "0"}
    told += [figures(feed, f"/api/samples/{name}", query) for name in ("step", "one")]
    assert b"NaN" not in json_of(told)


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
    assert feed.run()["steps"] == (0, 30) and list_steps(folder / "samples") == [0, 2, 4, 8, 16, 29]
    replace(folder / "metrics.jsonl", kind)
    replace(folder / "samples/step-000000.jsonl", kind)
    look(feed)
    assert f"{folder / 'metrics.jsonl'} cannot be read: is not a regular file" in feed.run()["problems"]
    with pytest.raises(InvalidArgument, match=r"step-000000.jsonl cannot be read: is not a regular file"):
        read_step(folder / "samples", 0)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("state_dir", b"/" + b"a" * 5000, "File name too long"),
        ("state_dir", b"/x\0y\n", "contains no path"),
        ("summary.json", b"[" * 100_000, "RecursionError"),
        ("summary.json", b" " * 2_000_000, "is larger than"),
        ("summary.json", b'{"seconds": NaN}', None),
        ("metrics.jsonl", b'{"step": 1, "metrics": {"\\ud800": -1e308, "%s": 1, "<b>": 1e308}}\n' % (b"n" * 1000), None),
        ("logs/supervisor.log", b"9999-99-99 99:99:99,000 INFO x event=restart service=coordinator\n", None),
        ("run.json", b'{"id": 1, "policy_version": 1e400, "recipe": {"a": "sha256:"}, "provenance": {"a": [Infinity]}}', None),
        ("logs/trainer.log", b"9999-99-99 99:99:99,000 ERROR \xff" + b"a" * 1_900_000 + b"\nx", None),
        ("logs/node.toml", b"a = " + b"[" * 100_000, None),
        ("memory.jsonl", b'{"time": NaN, "tags": [{}], "device_bytes": {}}\n', None),
        ("model/tokenizer.json", b'{"model": {"vocab": {"a": Infinity}}}', "OverflowError"),
        ("samples/step-000000.jsonl", json.dumps({"token_ids": [10**30], "rewards": {"\ud800": 1}}).encode() + b"\n", None),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_any_content_is_survived_and_told(tmp_path: Path, name: str, content: bytes, problem: str | None) -> None:
    folder = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    (folder / name).write_bytes(content)
    feed = Feed(lambda: place_of(folder))
    look(feed)
    ask_all(feed)
    look(feed)
    problems = feed.run()["problems"]
    if problem is None:
        assert problems == []
    else:
        assert re.fullmatch(rf"/.*/{name.rpartition('/')[2]} cannot be read: .*{problem}.*", *problems)
