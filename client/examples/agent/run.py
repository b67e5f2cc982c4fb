"""A tool agent that learns, on a CPU: makes the task, starts the three services, trains, stops them. Leaves runs/agent."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

from tasuki.cli.__main__ import exit_code_of
from tasuki.cli.train import run, told_how_to_continue
from tasuki.config.load import load_config

HERE = Path(__file__).resolve().parent


def main() -> int:
    started, output = time.monotonic(), Path(sys.argv[1] if sys.argv[1:] else "runs/agent")
    if (output / "node.toml").exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    for name in ("agent.py", "node.toml"):
        shutil.copy(HERE / name, output)  # the folder then works with every command of tasuki
    sys.stdout.write(f"making the task in {output / 'task'}: tokenizer, tiny model, supervised start\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, HERE / "make_task.py", output / "task"], check=True)
    config = load_config(output / "node.toml")
    with told_how_to_continue(config, output / "node.toml", []):
        return run(config, config_dir=output, started=started)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
