"""`tasuki config`: the effective configuration, with the origin of each key."""

import argparse
import sys
from collections.abc import Iterable, Sequence

from tasuki.config.load import load_config, origins, toml_lines, without_effect
from tasuki.config.schema import NodeConfig
from tasuki.models.tokenizer import check_tokenizer
from tasuki.wire.printable import printable


def run(arguments: argparse.Namespace) -> int:
    """Prints every key that has a value as TOML. Raises as load_config."""
    path, overrides = arguments.config, arguments.overrides
    config = load_config(path, overrides=overrides)
    lines = toml_lines(config.model_dump(exclude_none=True), (), comment=origins(path, overrides=overrides))
    sys.stdout.write("\n".join(lines) + "\n")
    warn_of_settings(config)
    return 0


def warn_of_settings(config: NodeConfig) -> None:
    """Tells settings without effect on standard error."""
    _warn(without_effect(config))


def warn_of_doubts(config: NodeConfig, doubts: Sequence[str] = ()) -> None:
    """Tells what is likely wrong with the model's tokenizer, and `doubts` of a run. Raises as check_tokenizer."""
    _warn([*check_tokenizer(config.model.path), *doubts])


def _warn(problems: Iterable[str]) -> None:
    for problem in problems:
        sys.stderr.write(printable(f"tasuki: warning: {problem}") + "\n")
