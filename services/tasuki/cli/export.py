"""`tasuki export`: a checkpoint as a Hugging Face folder, without a node."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from tasuki.runs.recorded_run import find_run
from tasuki.wire.errors import NotInstalled
from tasuki.wire.extras import install_extras


def run(checkpoint: Path, *, place: Path | None, output: Path | None, dtype: str) -> int:
    """place: the run, by default that in whose folder the checkpoint is. output: by default `model-NAME` there. dtype: "auto" as the run's.

    Raises NotInstalled without torch, and as find_run and export_checkpoint.
    """
    if find_spec("torch") is None:
        raise NotInstalled(f"an export needs torch: {install_extras('trainer')}", packages="torch", extras="trainer")
    from tasuki.trainer.backends.fsdp.checkpoint_export import export_checkpoint

    checkpoint = checkpoint.absolute()
    found = find_run(checkpoint.parent.parent if place is None else place)
    target = found.output_dir / f"model-{checkpoint.name}" if output is None else output.absolute()

    def told(done: int, num_tensors: int) -> None:
        if done % -(-num_tensors // 10) == 0:
            sys.stderr.write(f"exporting {checkpoint.name}: {done} of {num_tensors} tensors\n")

    num_bytes = export_checkpoint(
        checkpoint,
        target,
        source=found.config.model.path,
        compute_dtype=found.config.trainer.compute_dtype,
        dtype=found.config.export_dtype if dtype == "auto" else dtype,
        told=told,
    )
    sys.stdout.write(f"{target}  {num_bytes / 1e9:.3f} GB\n")
    return 0
