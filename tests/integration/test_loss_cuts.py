"""A call's gradient does not depend on ranks, micro-batches, or the number of calls into which it is cut.

`make test` runs every loss under token means and one loss under every aggregation; `make chaos` runs all combinations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.integration.launched import run_ranks
from tests.integration.loss_cuts import CASES
from tests.integration.plain_critic import add_head
from tests.models import make_model, save_checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of results, by number of ranks."""
    model = save_checkpoint(make_model("llama", seed=3), tmp_path_factory.mktemp("losses") / "model")
    add_head(model)
    folders = {num_ranks: tmp_path_factory.mktemp("cuts") for num_ranks in (1, 2)}
    for num_ranks, folder in folders.items():
        run_ranks("loss_cuts.py", folder, model, num_ranks=num_ranks)
    return folders


@pytest.fixture(scope="module")
def facts(folders: dict[int, Path]) -> dict[int, dict[str, Any]]:
    return {num_ranks: json.loads((folder / "facts.json").read_text()) for num_ranks, folder in folders.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_does_not_depend_on_micro_batches_and_calls(facts: dict[int, dict[str, Any]], name: str) -> None:
    for of_ranks in facts.values():
        case = of_ranks[name]
        assert case["norm"] > 0.1
        for cut in ("small", "middle", "calls"):
            assert case[f"gradient.{cut}"] <= 1e-6, cut
            assert case[f"loss.{cut}"] <= 1e-6 * max(1.0, abs(case["loss"])), cut


def test_a_gradient_does_not_depend_on_ranks(folders: dict[int, Path], facts: dict[int, dict[str, Any]]) -> None:
    one, two = (load_file(folder / "gradients.safetensors") for folder in folders.values())
    assert one.keys() == two.keys() == CASES.keys()
    for name, gradient in one.items():
        assert float((gradient - two[name]).norm() / gradient.norm()) <= 1e-6, name
        for figure in facts[1][name]:
            if figure == "loss" or figure.startswith("metric"):
                assert facts[2][name][figure] == pytest.approx(facts[1][name][figure], rel=1e-6, abs=1e-6), (name, figure)


def test_what_corrections_and_clips_do_is_seen_in_these_losses(facts: dict[int, dict[str, Any]]) -> None:
    for name in ("ppo", "gspo", "cispo"):
        case = facts[1][f"{name}-token_mean"]
        assert 0 < case["metric.clip_fraction"] < 1, name
        assert case["metric.correction_truncated"] > 0, name
    assert 0 < facts[1]["ppo-token_mean"]["metric.correction_masked"] < 1
    assert 0 < facts[1]["value-token_mean"]["metric.clip_fraction"] < 1
