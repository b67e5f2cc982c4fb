"""Losses and gradient norms of 20 steps from one seed: every setting that saves memory or time against the default, in float32.

`python -m tests.integration.test_loss_curves` prints the table of docs/benchmarks.md.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tasuki.algorithms.loss_types import LossConfig
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tests.integration.launched import run_ranks
from tests.integration.learning import learn, start_learner
from tests.integration.test_prefix_sharing import grouped_samples
from tests.models import make_model, save_checkpoint

KINDS = ("qwen2",)
DIFFERING = {"moments = 8bit": 2e-3}
"""Settings that change the numbers, with the tolerance for losses and norms relative to the default's largest."""
ROUNDING = 1e-5
Curve = Sequence[tuple[float, float]]


NUM_STEPS = 20
MAX_TOKENS = 64
SETTINGS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "default": {},
        "one micro-batch": {"max_tokens": 4096},
        "checkpointing = attention": {"checkpointing": "attention"},
        "checkpointing = full": {"checkpointing": "full"},
        "checkpointing = offloaded": {"checkpointing": "offloaded"},
        "moments = host": {"moments": "host"},
        "mlp_tile_tokens = 16": {"mlp_tile_tokens": 16},
        "prefix_sharing": {"prefix_sharing": True},
        "moments = 8bit": {"moments": "8bit"},
    },
    2: {"two ranks": {}, "sequence_parallel = 2": {"sequence_parallel": 2}},
}
"""Settings by number of ranks. All but `max_tokens` belong to the table [trainer]."""


def curve(model: Path, *, mesh: DeviceMesh, max_tokens: int = MAX_TOKENS, **trainer: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    given = {"learning_rate": 1e-3, "micro_batch_tokens": 4096, "checkpointing": "none", **trainer}
    learner = start_learner(model, mesh=mesh, **given)
    samples, steps = decode_samples(grouped_samples()), list[tuple[float, float]]()
    for _ in range(NUM_STEPS):
        loss = learn(learner, Role.POLICY, samples, config=LossConfig(), max_tokens=max_tokens).loss
        steps.append((loss, learner.optim_step(Role.POLICY).grad_norm))
    return steps


def write_curves(mesh: DeviceMesh, output: Path, models: Sequence[Path]) -> None:
    for model in models:
        found = {name: curve(model, mesh=mesh, **settings) for name, settings in SETTINGS[mesh.size()].items()}
        if dist.get_rank() == 0:
            (output / f"{model.name}-{mesh.size()}.json").write_text(json.dumps(found))


def curves(kinds: Sequence[str], folder: Path) -> dict[str, dict[str, Curve]]:
    """Returns curves by family and setting."""
    models = [save_checkpoint(make_model(kind, seed=0), folder / kind) for kind in kinds]
    found: dict[str, dict[str, Curve]] = {kind: {} for kind in kinds}
    for num_ranks in SETTINGS:
        run_ranks(write_curves, folder, models, num_ranks=num_ranks)
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
