"""Runs one rank of the trainer; rank 0 also serves:

python -m tasuki.trainer.launch --num-ranks N -- -m tasuki.trainer --config node.toml

A spawned rank reports errors in its configuration before it imports anything heavy.
"""

import logging
import os
import sys
from pathlib import Path

from tasuki.config.choices import read_choices
from tasuki.config.gpus import show_gpus
from tasuki.config.load import config_argument, load_config
from tasuki.config.lock import StateLock
from tasuki.config.paths import FIRST_START_VARIABLE, nccl_log_path, node_targets
from tasuki.config.schema import NodeConfig
from tasuki.rpc.logs import configure_logging
from tasuki.rpc.memory import staying_tags, wait_to_leave
from tasuki.rpc.process_start import StartSeconds
from tasuki.trainer.launch import Launch, cache_variables, nccl_log_variables, read_launch, socket_variables
from tasuki.wire.errors import InvalidArgument, TasukiError
from tasuki.wire.stages import Service


def main() -> int:
    path = config_argument("trainer")
    configure_logging("trainer")
    start = StartSeconds(os.environ)
    try:
        launch = read_launch(os.environ)
        config = load_config(path)
        os.environ |= socket_variables(config.fleet)
        if config.device == "cuda":
            os.environ |= nccl_log_variables(config.fleet, path=_fresh_nccl_log(config, launch))
        if launch.num_ranks != config.trainer.num_ranks:
            raise InvalidArgument("trainer.num_ranks", f"is {config.trainer.num_ranks}, but {launch.num_ranks} were started")
        os.environ |= {name: value for name, value in cache_variables(config.state_dir).items() if name not in os.environ}
        show_gpus(config)
        if launch.rank != 0:
            return _work(config, launch, start)
        with StateLock.take(config.state_dir, name="trainer"):
            return _serve(config, launch, start)
    except TasukiError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"tasuki: error {error.reason}: {error.message}\n")
        return 2


def _fresh_nccl_log(config: NodeConfig, launch: Launch) -> Path:
    """Keeps the log of the rank's last start, whose NCCL may have failed."""
    path = nccl_log_path(config.state_dir, launch.local_rank)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.exists():
        path.replace(path.with_name(f"{path.name}.old"))
    return path


def _work(config: NodeConfig, launch: Launch, start: StartSeconds) -> int:
    from tasuki.trainer.rank import run_rank  # torch

    start.end("imports")
    _wait_for_rollout(config, start)
    return 0 if run_rank(config, launch=launch, start=start) else 1


def _serve(config: NodeConfig, launch: Launch, start: StartSeconds) -> int:
    import uvloop

    from tasuki.trainer.serve import serve  # torch

    start.end("imports")
    _wait_for_rollout(config, start)
    return uvloop.run(serve(config, launch=launch, start=start))


def _wait_for_rollout(config: NodeConfig, start: StartSeconds) -> None:
    """Waits until the engine has left the memory that this rank needs. On a CPU a restarted rank has its memory."""
    choices = read_choices(config.state_dir)
    must_serve = not choices.starts_together and FIRST_START_VARIABLE in os.environ
    if config.device == "cuda" or must_serve:
        target, staying = node_targets(config)["rollout"], staying_tags(config, choices, Service.ROLLOUT)
        wait_to_leave(Service.ROLLOUT, target, staying=staying, must_serve=must_serve)
        start.end("room")


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # A thread inside a collective whose peer is gone cannot be stopped, and must not keep the process alive.
    os._exit(status)
