"""python -m tasuki.rollout --config node.toml [--set a.b=c]...

Spawned engine ranks import this file again, so `main` does the heavy imports.
"""

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from multiprocessing.util import Finalize
from pathlib import Path

from tasuki.config import paths
from tasuki.config.gpus import show_gpus
from tasuki.config.load import load_config
from tasuki.config.lock import StateLock
from tasuki.config.schema import NodeConfig
from tasuki.rollout.environment import cache_variables, engine_environment, foreign_variables
from tasuki.rollout.model import read_model
from tasuki.rollout.ranks import RankProcesses
from tasuki.rpc.heartbeat import Heartbeat
from tasuki.rpc.logs import configure_logging
from tasuki.rpc.memory import wait_to_leave
from tasuki.rpc.process_start import StartSeconds, StartupDeadline
from tasuki.wire.errors import TasukiError
from tasuki.wire.stages import Service

_log = logging.getLogger(__name__)


def main() -> int:
    """Runs the service until SIGTERM or SIGINT. Returns the exit code: 0 after a requested stop."""
    parser = argparse.ArgumentParser(prog="tasuki.rollout", description="Rollout service of one tasuki node.")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config, overrides=arguments.overrides)
        configure_logging("rollout")
        logging.getLogger("sglang").setLevel(logging.WARNING)
        return _serve(config, StartupDeadline(config.coordinator.stage_timeout_s), StartSeconds(os.environ))
    except TasukiError as error:
        sys.stderr.write(f"tasuki.rollout: {error.reason}: {error.message}\n")
        return 1


def _serve(config: NodeConfig, deadline: StartupDeadline, start: StartSeconds) -> int:
    model, temp_dir = read_model(config), paths.engine_dir(config.state_dir)
    with StateLock.take(config.state_dir, name="rollout") as lock, ExitStack() as cleanup:
        shutil.rmtree(temp_dir, ignore_errors=True)  # left by a killed service
        temp_dir.mkdir(mode=0o700)
        # Runs at interpreter exit, after multiprocessing has removed its own files there (at priority -100).
        Finalize(None, shutil.rmtree, args=(temp_dir, True), exitpriority=-200)
        deadline.before_exit.callback(shutil.rmtree, temp_dir, ignore_errors=True)
        deadline.before_exit.callback(cleanup.close)
        kept = cache_variables(config.state_dir, given=os.environ)
        _set_environment({**engine_environment(config, model, temp_dir=temp_dir), **kept})
        show_gpus(config)
        cleanup.callback(Heartbeat(config.state_dir, "rollout").close)  # covers the start; the service has its own
        ranks = RankProcesses()
        cleanup.callback(ranks.kill)
        cleanup.callback(deadline.finish)
        # At the node's start a trainer that serves already has left the engine its room.
        if config.device == "cuda" and paths.FIRST_START_VARIABLE not in os.environ:
            wait_to_leave(Service.TRAINER, paths.node_targets(config)["trainer"])
            start.end("room")
        ranks.start(config, held=[lock])
        from tasuki.rollout.serve import serve

        start.end("imports")
        return serve(config, model, ranks, deadline, start)


def _set_environment(ours: Mapping[str, str]) -> None:
    """Sets the environment of this process and of the engine's processes, which inherit it."""
    dropped = foreign_variables(os.environ)
    for name in dropped:
        del os.environ[name]
    if dropped:
        _log.warning("event=environment_dropped names=%s", ",".join(dropped))
    os.environ.update(ours)


if __name__ == "__main__":
    sys.exit(main())
