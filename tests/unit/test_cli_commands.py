"""Commands that `tasuki` has, as its help and its errors name them."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tasuki.cli.__main__ import main
from tasuki.cli.node_snapshot import NodeSnapshot
from tasuki.cli.node_tables import draw
from tasuki.v1 import coordinator_pb2, memory_pb2, rollout_pb2, trainer_pb2


def test_an_unknown_command_is_answered_with_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bogus"])
    offered = re.findall(r"'(\w+)'", capsys.readouterr().err.partition("choose from")[2])
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert offered == re.findall(r"^    (\w+)\b", capsys.readouterr().out, flags=re.MULTILINE)


def test_an_error_shows_control_characters_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "node.toml"
    config.write_text('state_dir = "s"\n"\\u001b[31mevil\\u0007\\u009b" = 1\n[model]\npath = "m"\n')
    assert main(["up", str(config)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("tasuki: error INVALID_ARGUMENT") and r"\x1b[31mevil\x07\x9b" in told
    assert all(char.isprintable() or char == "\n" for char in told)


def test_a_nodes_state_shows_control_characters_escaped() -> None:
    node = coordinator_pb2.NodeState(last_error="the path /x\x1b]0;evil\x07 \N{LATIN SMALL LETTER E WITH ACUTE} exists")
    snapshot = NodeSnapshot(
        node=node,
        trainer=trainer_pb2.GetTrainerStateResponse(),
        rollout=rollout_pb2.GetRolloutStateResponse(),
        trainer_memory=memory_pb2.GetUsageResponse(),
        rollout_memory=memory_pb2.GetUsageResponse(),
        changeovers=(),
        absent={},
    )
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    console.print(draw(snapshot))
    assert "the path /x\\x1b]0;evil\\x07 \N{LATIN SMALL LETTER E WITH ACUTE} exists" in shown.getvalue()
