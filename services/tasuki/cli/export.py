"""`tasuki export`: a checkpoint as a Hugging Face folder, without a node."""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from tasuki.runs.earlier_run import find_run, is_checkpoint
from tasuki.wire.errors import NotInstalled, PathNotFound
from tasuki.wire.extras import install_extras


def run(arguments: argparse.Namespace) -> int:
    """checkpoint: or a run, of which the newest is exported. place: the run or the node, by default the run in whose folder the checkpoint
    is. output: by default `model-NAME` there, or beside a checkpoint outside the run's folder. dtype: "auto" as the run's.

    Raises NotInstalled without torch, and as find_run and export_checkpoint.
    """
    if find_spec("torch") is None:
        raise NotInstalled(f"an export needs torch: {install_extras('trainer')}", packages="torch", extras="trainer")
    from tasuki.trainer.backends.fsdp.checkpoint import export_checkpoint

    given: Path = arguments.checkpoint
    is_saved = is_checkpoint(given)
    try:
        found = find_run(arguments.place or (given.absolute().parent.parent if is_saved else given))
    except PathNotFound as error:
        if arguments.place is not None:
            raise
        where = "is in no run's folder: give its run or CONFIG by --run" if is_saved else "is neither a checkpoint nor a run"
        raise PathNotFound(f"{given} {where}", path=given) from error
    checkpoint = found.checkpoint(str(given) if is_saved or arguments.place else None)
    found.check_model()
    run = found.config.train or found.config.sft
    is_own = run is not None and checkpoint.resolve().is_relative_to(run.output_dir.resolve())
    folder = found.output_dir if is_own else checkpoint.parent
    target = (arguments.output or folder / f"model-{checkpoint.name}").absolute()

    def told(done: int, num_tensors: int) -> None:
        if done % -(-num_tensors // 10) == 0:
            sys.stderr.write(f"exporting {checkpoint.name}: {done} of {num_tensors} tensors\n")

    num_bytes = export_checkpoint(
        checkpoint,
        target,
        source=found.config.model.path,
        compute_dtype=found.config.trainer.compute_dtype,
        dtype=found.config.export_dtype if arguments.dtype == "auto" else arguments.dtype,
        told=told,
    )
    sys.stdout.write(f"{target}  {num_bytes / 1e9:.3f} GB\n")
    return 0
