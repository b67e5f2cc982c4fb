"""Commands that `tasuki` has, as its help and its errors name them."""

from __future__ import annotations

import re

import pytest

from tasuki.cli.__main__ import main


def test_an_unknown_command_is_answered_with_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bogus"])
    offered = re.findall(r"'(\w+)'", capsys.readouterr().err.partition("choose from")[2])
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert offered == re.findall(r"^    (\w+)\b", capsys.readouterr().out, flags=re.MULTILINE)
