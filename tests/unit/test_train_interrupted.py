"""What an interrupted `tasuki train` says."""

from __future__ import annotations

from pathlib import Path

from tasuki.cli.train import how_to_continue
from tasuki.config.lock import NODE_LOCK, StateLock
from tests.planned import config_of


def test_an_interrupted_run_is_continued_where_its_node_is(tmp_path: Path) -> None:
    config, given = config_of(state_dir=tmp_path), (Path("my node.toml"), ["--set", "train.num_steps=9"])
    train = "tasuki train 'my node.toml' --set train.num_steps=9 --resume"
    up = "tasuki up 'my node.toml' --set train.num_steps=9 --resume"
    assert how_to_continue(config, *given) == f"nothing is lost; to continue: {up}, then {train}"
    with StateLock.take(tmp_path, name=NODE_LOCK):
        assert how_to_continue(config, *given) == f"nothing is lost; to continue: {train}"
