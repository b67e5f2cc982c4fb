"""Losses and gradient norms of 20 steps from one seed: every setting that saves memory or time against the default, in float32.

`python -m tests.integration.test_loss_curves` prints the table of docs/benchmarks.md.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.integration.curve_ranks import NUM_STEPS, SETTINGS
from tests.integration.launched import run_ranks
from tests.models import make_model, save_checkpoint

KINDS = ("qwen2",)
DIFFERING = {"moments = 8bit": 2e-3}
"""Settings that change the numbers, with the tolerance for losses and norms relative to the default's largest."""
ROUNDING = 1e-5
Curve = Sequence[tuple[float, float]]


def curves(kinds: Sequence[str], folder: Path) -> dict[str, dict[str, Curve]]:
    """Returns curves by family and setting."""
    models = [save_checkpoint(make_model(kind, seed=0), folder / kind) for kind in kinds]
    found: dict[str, dict[str, Curve]] = {kind: {} for kind in kinds}
    for num_ranks in SETTINGS:
        run_ranks("curve_ranks.py", folder, *map(str, models), num_ranks=num_ranks)
        for kind in kinds:
            found[kind] |= json.loads((folder / f"{kind}-{num_ranks}.json").read_text())
    return found


def off_by(curve: Curve, default: Curve) -> tuple[float, float]:
    """Largest difference of a loss and of a norm, relative to the default's largest."""
    pairs = list(zip(zip(*curve, strict=True), zip(*default, strict=True), strict=True))
    loss, norm = (max(abs(x - y) for x, y in zip(one, other, strict=True)) / max(map(abs, other)) for one, other in pairs)
    return loss, norm


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Curve]]:
    return curves(KINDS, tmp_path_factory.mktemp("curves"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setting", [name for settings in SETTINGS.values() for name in settings if name != "default"])
def test_a_setting_learns_as_the_default(found: Mapping[str, Mapping[str, Curve]], kind: str, setting: str) -> None:
    default, curve = found[kind]["default"], found[kind][setting]
    assert len(curve) == len(default) == NUM_STEPS
    assert default[0][0] - default[-1][0] > 100 * ROUNDING, "it learns"
    loss, norm = off_by(curve, default)
    assert max(loss, norm) <= DIFFERING.get(setting, ROUNDING)
    assert setting not in DIFFERING or max(loss, norm) > ROUNDING, "it says that it changes the numbers"


def print_table() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = curves(KINDS, Path(folder))
    for setting in (name for settings in SETTINGS.values() for name in settings if name != "default"):
        differences = [f"{each:.0e}" for kind in found.values() for each in off_by(kind[setting], kind["default"])]
        sys.stdout.write(f"| {setting} | {' | '.join(differences)} |\n")


if __name__ == "__main__":
    print_table()
