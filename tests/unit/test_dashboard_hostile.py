"""The dashboard on a damaged or hostile folder: the rest of the run is shown, and a line says which file cannot be read."""

from __future__ import annotations

import os
import shutil
import socket
from contextlib import closing
from pathlib import Path

import pytest

from tasuki.cli.dashboard.feed import Feed
from tasuki.cli.dashboard.places import place_of
from tasuki.wire.errors import InvalidArgument
from tests.dashboard import RECORDED

pytestmark = pytest.mark.timeout(20)


def replace(path: Path, kind: str) -> None:
    """Puts something that is no file in a file's place."""
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
    """Reads all there is, as the feed's thread does."""
    while feed._look():
        pass


def ask_all(feed: Feed) -> None:
    """Everything that pages ask for."""
    feed.node(), feed.curves(first=0, last=9, points=10), feed.memory(changeovers=10), feed.changeover_chart(points=10)
    for step in feed.sample_steps()[:1]:
        feed.samples(step), feed.sample(step, 0)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "socket"])
def test_what_is_no_file_is_named_and_the_rest_is_shown(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    folder = Path(shutil.copytree(RECORDED, tmp_path / "run"))
    names = ["state_dir", "journal.sqlite", "logs/supervisor.log", "memory.jsonl", "model/tokenizer.json", "summary.json"]
    for name in names:
        replace(folder / name, kind)
    feed = Feed(lambda: place_of(folder))
    look(feed)
    ask_all(feed)
    look(feed)
    assert feed.run()["problems"] == [f"{folder / name} cannot be read: is not a regular file" for name in names]
    assert feed.run()["steps"] == (0, 30) and feed.sample_steps() == [0, 2, 4, 8, 16, 29]
    replace(folder / "metrics.jsonl", kind)
    replace(folder / "samples/step-000000.jsonl", kind)
    look(feed)
    assert f"{folder / 'metrics.jsonl'} cannot be read: is not a regular file" in feed.run()["problems"]
    with pytest.raises(InvalidArgument, match=r"step-000000.jsonl cannot be read: is not a regular file"):
        feed.samples(0)
