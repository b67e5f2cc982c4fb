"""The recipe for mathematics: its reward, and the cards that its configurations fit."""

from pathlib import Path

import pytest

from tasuki.cli.math_rewards import correct
from tasuki.config.load import load_config
from tasuki.planner.choose import choose
from tasuki.planner.node import GB, node_of
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS

RECIPE = Path(__file__).parents[2] / "client" / "examples" / "math"
CONFIGS = {"24gb": "qwen2.5-1.5b", "48gb": "qwen2.5-7b", "80gb": "qwen2.5-7b", "141gb": "qwen2.5-32b"}


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("12 + 34 = 46", "46", 1),
        ("It is 46.", 46, 1),
        ("First 46, then 47", "46", 0),
        ("$1,200.00", "1200", 1),
        ("-3", "3", 0),
        (r"so \boxed{46}, not 47", "46", 1),
        (r"\boxed{46} or rather \boxed{47}", "46", 0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1),
        (r"\boxed{\left( 1, \sqrt{2} \right)}", r"(1,\sqrt{2})", 1),
        (r"\boxed{x^{2}", "2", 1),  # never closed: the last number counts
        (r"\boxed{12\text{ cm}}", "12", 1),
        ("1/0", "1/0", 1),
        ("no number", "5", 0),
        ("", "", 0),
        ("72", "48+24 = <<48+24=72>>72\n#### 72", 1),
        (r"\boxed{9}", r"The sum is $\boxed{9}$.", 1),
        ("9" * 20_000, "1", 0),
    ],
)
def test_the_last_answer_counts(completion: str, answer: str, reward: float) -> None:
    assert correct(completion, answer) == reward


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_fits_its_card(name: str) -> None:
    config = load_config(RECIPE / f"{name}.toml")
    gpu_bytes = int(name.removesuffix("gb")) * GB
    planned = plan(choose(node_of(config, MODELS[CONFIGS[name]], gpu_bytes=gpu_bytes, host_bytes=2000 * GB)))
    assert planned.fits
