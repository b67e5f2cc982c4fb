"""A tool agent that learns, on a CPU: makes the task, starts the three services, trains, stops them. Leaves runs/agent.

`run.py --server openai_server.py --python environment/bin/python` runs the agent of an example server in its environment instead.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tasuki.cli.__main__ import exit_code_of
from tasuki.cli.train import run, told_how_to_continue
from tasuki.config.load import load_config

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", type=Path, default=Path("runs/agent"))
    parser.add_argument("--server", choices=sorted(file.name for file in HERE.glob("*_server.py")))
    parser.add_argument("--python", default=sys.executable, help="of the server's environment")
    arguments = parser.parse_args()
    started, output = time.monotonic(), arguments.output
    if (output / "node.toml").exists():
        shutil.rmtree(output)
    output.mkdir(parents=True)
    for name in ("agent.py", "node.toml"):
        shutil.copy(HERE / name, output)  # the folder then works with every command of tasuki
    sys.stdout.write(f"making the task in {output / 'task'}: tokenizer, tiny model, supervised start\n")
    sys.stdout.flush()
    subprocess.run([sys.executable, HERE / "make_task.py", output / "task"], check=True)
    with served(output, arguments.python, arguments.server) if arguments.server else nullcontext():
        config = load_config(output / "node.toml")
        with told_how_to_continue(config, output / "node.toml", []):
            return run(config, config_dir=output, started=started)


@contextmanager
def served(output: Path, python: str, script: str) -> Iterator[None]:
    """Runs a server beside the training, whose episodes are then the server's."""
    python = str(Path(python).absolute()) if "/" in python else python
    task, argv = (output / "task").resolve(), [python, str(HERE / script)]
    environment = {**os.environ, "LOOK_UP_TASK": f"{task}set"}  # noqa: TID251 - the server's is the user's
    if script == "verifiers_server.py":
        argv.append("look_up_env")
        shutil.copytree(task, f"{task}set")
        rows = subprocess.run(argv, env=environment, cwd=HERE, stdout=subprocess.PIPE, check=True).stdout.splitlines(True)
        num_eval = len((task / "eval.jsonl").read_bytes().splitlines())
        (task / "eval.jsonl").write_bytes(b"".join(rows[:num_eval]))
        (task / "train.jsonl").write_bytes(b"".join(rows[num_eval:]))
    else:
        argv.append(str(task))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = output / "node.toml"
    config.write_text(
        config.read_text().replace('function = "agent:solve"', f'server = "http://127.0.0.1:{port}/run"\ntimeout_s = 300')
    )
    with subprocess.Popen([*argv, str(port)], env=environment, cwd=HERE) as server:
        try:
            while not answers(port):
                if server.poll() is not None:
                    sys.exit(f"the server has ended with code {server.returncode}")
                time.sleep(0.2)
            yield
        finally:
            server.kill()


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
