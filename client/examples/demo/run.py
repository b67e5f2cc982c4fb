"""The demo: makes the task, starts the three services, trains with GRPO, stops them. Run it with `make demo`."""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tasuki.cli.__main__ import USER_ERROR, exit_code_of
from tasuki.cli.train import run, told_how_to_continue
from tasuki.config.load import load_config
from tasuki.rpc.failpoints import check_failpoints
from tasuki.wire.errors import PathExists
from tasuki.wire.stages import RULES, Stage

HERE = Path(__file__).resolve().parent
PROCESS = r"coordinator|trainer\d*|rollout|scheduler\d+"
CONFIG = HERE.parents[2] / "deploy" / "config" / "demo.toml"


def main() -> int:
    started = time.monotonic()
    arguments = _parser().parse_args()
    overrides = [f"seed={arguments.seed}", *arguments.overrides]
    if arguments.kill:
        os.environ["TASUKI_FAILPOINTS"] = arguments.kill  # noqa: TID251  of the node's processes

    def run_demo() -> int:
        check_failpoints(load_config(CONFIG, overrides=overrides))
        return demo(arguments.output, seed=arguments.seed, overrides=overrides, started=started)

    return exit_code_of(run_demo)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"))
    parser.add_argument(
        "--kill",
        type=failpoint_of,
        metavar="PROCESS@STAGE",
        help="kill a process during the run, e.g. rollout@SYNC, trainer1@OFFLOAD, coordinator@DRAIN, scheduler0@RESUME_KV",
    )
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE")
    return parser


def failpoint_of(kill: str) -> str:
    """The failpoint that kills the process when the stage runs for the fourth time; the coordinator kills other processes."""
    process, _, stage = kill.partition("@")
    if not re.fullmatch(PROCESS, process) or stage not in list(Stage):
        raise argparse.ArgumentTypeError(
            f"{kill!r} is not PROCESS@STAGE; processes: coordinator, trainer, trainer1, rollout, scheduler0; stages: {', '.join(Stage)}"
        )
    if process == RULES[Stage(stage)].service:
        return f"{process}@{stage}:4=kill"
    return f"coordinator@{stage}.intended:4=kill" + ("" if process == "coordinator" else f"({process})")


def remove_earlier(output: Path) -> None:
    """Removes the folder of an earlier demo, even of one that failed at once. Raises PathExists for another folder."""
    config = output / "config.toml"
    if config.exists() and ((output / "task" / "eval.jsonl").exists() or config.read_bytes() == CONFIG.read_bytes()):
        shutil.rmtree(output)
    if output.exists():
        raise PathExists(f"{output} is not from a demo; move it, or give another --output", path=output)


def demo(output: Path, *, seed: int, overrides: list[str], started: float) -> int:
    remove_earlier(output)
    output.mkdir(parents=True)
    config = output / "config.toml"
    shutil.copy(CONFIG, config)
    shutil.copy(HERE / "reward.py", output)  # the folder then works with every command of tasuki

    sys.stdout.write(f"making the task in {output / 'task'}: tokenizer, tiny model, supervised start\n")
    sys.stdout.flush()
    # In a separate process, so that its torch does not occupy memory next to the services. Ctrl-C ends it through this one.
    command = [sys.executable, HERE / "make_task.py", output / "task", "--seed", str(seed)]
    made = subprocess.run(command, check=False, process_group=0)
    if made.returncode != 0:
        sys.stderr.write(f"the task was not made: make_task.py ended with code {made.returncode}\n")
        return USER_ERROR
    settings = load_config(config, overrides=overrides)
    with told_how_to_continue(settings, config, overrides):
        return run(settings, config_dir=output, started=started)


if __name__ == "__main__":
    sys.exit(main())
