"""The example configurations are ones that a node takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.config.load import load_config

CONFIGS = sorted((Path(__file__).parents[2] / "deploy" / "config").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_example_loads_and_says_what_to_train(path: Path):
    config = load_config(path)
    assert config.train is not None
    assert config.model.path.is_absolute()


def test_there_are_examples():
    assert {"cpu", "demo", "gpu"} <= {path.stem for path in CONFIGS}
