"""What an interrupted `tasuki train` says."""

from pathlib import Path

import pytest

from tasuki.cli import train
from tasuki.cli.__main__ import main
from tasuki.cli.train import how_to_continue
from tasuki.config.lock import NODE_LOCK, StateLock
from tasuki.config.schema import NodeConfig
from tasuki.wire.errors import NodeDown
from tests.planned import config_of


def test_an_interrupted_run_is_continued_where_its_node_is(tmp_path: Path) -> None:
    config, given = config_of(state_dir=tmp_path), (Path("my node.toml"), ["train.num_steps=9"])
    train = "tasuki train 'my node.toml' --set train.num_steps=9 --resume"
    up = "tasuki up 'my node.toml' --set train.num_steps=9 --resume"
    assert how_to_continue(config, *given) == f"nothing is lost; to continue: {up}, then {train}"
    with StateLock.take(tmp_path, name=NODE_LOCK):
        assert how_to_continue(config, *given) == f"nothing is lost; to continue: {train}"


def test_a_run_whose_node_ended_is_told_how_to_go_on_once_it_has_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [KeyboardInterrupt(), NodeDown("its supervisor was killed", state_dir=tmp_path)] * 2

    def ended(config: NodeConfig, **_: object) -> int:
        raise errors.pop()

    monkeypatch.setattr(train, "run", ended)
    node, steps = tmp_path / "node.toml", tmp_path / "out" / "metrics.jsonl"
    text = (
        'state_dir = "node"\ndevice = "cpu"\nmodel.path = "m"\n[sft]\ndataset = "d.jsonl"\noutput_dir = "out"\nnum_steps = 1\n'
    )
    node.write_text(text)
    assert [main(["train", str(node)]) for _ in range(2)] == [2, 130] and "to continue" not in capsys.readouterr().err
    steps.parent.mkdir()
    steps.touch()
    assert [main(["train", str(node)]) for _ in range(2)] == [2, 130]
    assert f"tasuki up {node} --resume, then tasuki train {node} --resume\n" in capsys.readouterr().err
