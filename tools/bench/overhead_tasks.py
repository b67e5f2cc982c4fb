"""Tasks of the overhead benchmark: the demo, or the example with SmolLM2-135M-Instruct, both with constant weights."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.bench.processes import REPOSITORY

_EXAMPLES = REPOSITORY / "client" / "examples"
_SMOLLM = REPOSITORY / ".example" / "model"
_ENDLESS = 1_000_000
_ALIKE = (
    "trainer.learning_rate=1e-9",
    f"train.num_steps={_ENDLESS}",
    f"train.eval_every={_ENDLESS}",
    f"train.reward.timeout_s={_ENDLESS}",
)
"""Overrides that make all steps do the same work."""
_ON_GPU = (
    'rollout.engine.attention_backend="triton"',
    'rollout.engine.sampling_backend="pytorch"',
    "train.max_new_tokens=256",
    "rollout.context_length=320",
    "rollout.engine.max_total_tokens=327680",
    "rollout.max_running_requests=1024",
)
"""Overrides for steps of several seconds; steps of 12 tokens vary by a tenth, since a thousand requests start and end within one."""
_REWARDS = '''\
"""Rewards at random, and the gate at which the run waits for its turn."""

import time
from pathlib import Path

HOLD, ARRIVED = (Path(__file__).with_name(name) for name in ("hold", "arrived"))


def exact(*, completion: str) -> float:
    if HOLD.exists():
        ARRIVED.touch()
        while HOLD.exists():
            time.sleep(0.001)
    return sum(map(ord, completion)) % 7 / 7


def form(*, completion: str) -> float:
    return len(completion) % 5 / 5
'''


@dataclass(frozen=True, slots=True)
class Task:
    """config: of the node and the run. example: folder of its make_task.py. rewards: name of the module in the configuration."""

    config: Path
    example: Path
    rewards: str
    overrides: tuple[str, ...]
    left_out: str = ""
    """Lines of the configuration that overrides cannot remove."""

    @property
    def device(self) -> str:
        return torch.cuda.get_device_name() if 'device = "cuda"' in self.config.read_text() else "cpu"

    def make(self, folder: Path) -> None:
        """Raises RuntimeError without SmolLM2, which `make example` installs."""
        subprocess.run([sys.executable, self.example / "make_task.py", folder, "--seed", "0"], cwd=REPOSITORY, check=True)
        if (folder / "model").exists():
            return
        if not _SMOLLM.exists():
            raise RuntimeError(f"there is no model in {_SMOLLM}; `make .example/.installed` makes it")
        (folder / "model").symlink_to(_SMOLLM)

    def write_side(self, folder: Path, *, task: Path) -> list[str]:
        """Writes the configuration and the files that it names. Returns its overrides."""
        folder.mkdir(parents=True)
        config = self.config.read_text()
        assert self.left_out in config
        # The dashboard reads the file alone, without overrides.
        (folder / "config.toml").write_text(f"{config.replace(self.left_out, '')}\n[security]\ninsecure = true\n")
        (folder / f"{self.rewards}.py").write_text(_REWARDS)
        (folder / "task").symlink_to(task)
        return [*_ALIKE, *self.overrides, f"train.output_dir={folder / 'run'}"]


def task_named(name: str) -> Task:
    """Returns a task by name. demo: on a CPU. arithmetic: SmolLM2 as in `make example`, on a GPU if there is one."""
    if name == "demo":
        return Task(
            REPOSITORY / "deploy" / "config" / "demo.toml",
            _EXAMPLES / "demo",
            "reward",
            overrides=(),
            left_out="stop_at_eval_score = 0.985\n",
        )
    example = _EXAMPLES / "arithmetic"
    if not torch.cuda.is_available():
        return Task(example / "arithmetic.toml", example, "rewards", overrides=("train.max_batches=1",))
    return Task(example / "gpu.toml", example, "rewards", overrides=_ON_GPU)
