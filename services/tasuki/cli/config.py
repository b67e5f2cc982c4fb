"""`tasuki config`: the effective configuration, with the origin of each key."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tasuki.config.checks import without_effect
from tasuki.config.load import load_config, origins
from tasuki.config.save import toml_lines
from tasuki.config.schema import NodeConfig
from tasuki.models.tokenizer import check_tokenizer
from tasuki.wire.printable import printable


def show_config(path: Path, *, overrides: Sequence[str]) -> int:
    """Prints every key that has a value as TOML. Raises as load_config."""
    config = load_config(path, overrides=overrides)
    lines = toml_lines(config.model_dump(exclude_none=True), (), comment=origins(path, overrides=overrides))
    sys.stdout.write("\n".join(lines) + "\n")
    warn_of_settings(config)
    return 0


def warn_of_settings(config: NodeConfig) -> None:
    """Tells settings without effect on standard error."""
    for problem in without_effect(config):
        _warn(problem)


def warn_of_tokenizer(config: NodeConfig) -> None:
    """Tells what is likely wrong with the model's tokenizer. Raises as check_tokenizer."""
    for problem in check_tokenizer(config.model.path):
        _warn(problem)


def _warn(problem: str) -> None:
    sys.stderr.write(printable(f"tasuki: warning: {problem}") + "\n")
