"""The `tasuki` command: reads the command line, calls one function, and turns errors into one line each."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from tasuki.cli.fleet_arguments import add_fleet_commands
from tasuki.cli.plan_arguments import add_plan_arguments
from tasuki.config.load import load_beside_node, load_config
from tasuki.config.lock import StateLock
from tasuki.config.places import config_path
from tasuki.config.schema import NodeConfig
from tasuki.config.track_schema import TRACKERS, TrackConfig
from tasuki.rpc.logs import configure_logging
from tasuki.wire.errors import NodeDown, ServiceFailed, TasukiError

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

USER_ERROR, SERVICE_ERROR, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 1 when a service failed, 2 for every other error, 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return exit_code_of(lambda: arguments.run(arguments))


def exit_code_of(command: Callable[[], int]) -> int:
    """Runs a command; what it raises becomes one line and an exit code, and a crash in native code leaves the Python stack on stderr."""
    faulthandler.enable(file=2)
    # Also for SIGINT: a shell starts its background jobs with that one ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    try:
        return command()
    except TasukiError as error:
        sys.stderr.write(f"tasuki: error {error.reason}: {error.message}\n")
        return SERVICE_ERROR if isinstance(error, ServiceFailed) else USER_ERROR
    except OSError as error:  # a file or folder that cannot be read or written
        sys.stderr.write(f"tasuki: error {type(error).__name__}: {error}\n")
        return USER_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("tasuki: interrupted\n")
        return INTERRUPTED


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """SIGTERM ends the command as Ctrl-C does, so that what it started is stopped."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tasuki", description="RL post-training as services that share the GPUs in turn.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = _command(commands, "up", _up, "start a node: coordinator, trainer and rollout")
    up.add_argument("config", type=Path, metavar="CONFIG")
    up.add_argument("--foreground", action="store_true", help="stay, and stop the node on Ctrl-C")
    up.add_argument(
        "--resume", action="store_true", help="go on where the last node on the state folder was, not from the model"
    )
    _add_overrides(up)
    down = _command(commands, "down", _down, "stop a node and wait until nothing of it is left")
    _add_node(down)
    state = _command(commands, "state", _state, "show phase, version, services and memory")
    _add_node(state)
    state.add_argument("--json", action="store_true", help="the same as one JSON object")
    state.add_argument("--serving", action="store_true", help="end with 1 while not all three services answer")
    watch = _command(commands, "watch", _watch, "follow stages and memory until Ctrl-C")
    _add_node(watch)
    train = _command(
        commands, "train", _train, "train as the [train] or [sft] table of CONFIG says; starts the node when none runs"
    )
    train.add_argument("config", type=Path, metavar="CONFIG")
    train.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in output_dir: from its newest checkpoint, or where it was on a node that still has it; "
        "begin where there is none",
    )
    train.add_argument("--no-start", action="store_true", help="only on a node that runs already")
    _add_overrides(train)
    plan = _command(commands, "plan", _plan, "predict the memory of a node, stage by stage, and say what to change")
    add_plan_arguments(plan)
    audit = _command(commands, "audit", _audit, "replay a run's journal and say whether it kept every promise")
    audit.add_argument(
        "run_path", type=Path, metavar="RUN", help="a state folder, an output folder, a journal, or a node's CONFIG"
    )
    audit.add_argument("--json", action="store_true", help="the same as one JSON object")
    certs = _command(
        commands, "certs", _certs, "make an authority and certificates for ports in a lab; again: new certificates"
    )
    certs.add_argument("folder", type=Path, metavar="FOLDER")
    certs.add_argument(
        "--host", dest="hosts", action="append", default=[], help="name or address of a node's machine; this one's by default"
    )
    certs.add_argument(
        "--fleet", action="store_true", help="give the node's certificate the role peer: nodes of a fleet call each other"
    )
    certs.add_argument("--days", type=int, default=90, help="how long the certificates are good (90)")
    doctor = _command(commands, "doctor", _doctor, "judge the machine, and whether a node would run on it")
    doctor.add_argument("config", type=Path, nargs="?", metavar="CONFIG")
    doctor.add_argument("--json", action="store_true", help="the same as a JSON list")
    _add_overrides(doctor)
    add_fleet_commands(commands)
    track = _command(commands, "track", _track, "give a run's figures to a tracker")
    track.add_argument("output_dir", type=Path, metavar="RUN", help="the run's output folder")
    track.add_argument("--to", required=True, choices=TRACKERS)
    track.add_argument("--project", default="tasuki", help="project or experiment (tasuki)")
    track.add_argument("--name", help="of the run; by default the folder's name")
    track.add_argument("--online", action="store_true", help="have wandb upload")
    track.add_argument("--follow", action="store_true", help="go on until the run ends")
    track.add_argument("--pipe-fd", type=int, help=argparse.SUPPRESS)  # of `tasuki train`, which ends with it
    dashboard = _command(commands, "dashboard", _dashboard, "show a node and its run, or a run that has ended, in a browser")
    shown = dashboard.add_mutually_exclusive_group(required=True)
    shown.add_argument("folder", type=Path, nargs="?", metavar="RUN", help="the run's output folder, or a node's state folder")
    shown.add_argument("--config", type=Path, metavar="CONFIG", help="the file that the node was started with")
    dashboard.add_argument(
        "--listen",
        default="127.0.0.1:8765",
        metavar="HOST:PORT",
        help="where to serve (127.0.0.1:8765); beyond loopback with the TLS and the callers of CONFIG's [security]",
    )
    supervise = commands.add_parser("supervise")  # started by `up` and `train`, not by users
    supervise.add_argument("state_dir", type=Path)
    supervise.add_argument("lock_fd", type=int)
    supervise.add_argument("starter_fd", type=int)
    supervise.set_defaults(run=_supervise)
    return parser


def _command(commands: _Commands, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE", help="overrides one key of CONFIG"
    )


def _add_node(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="the file that the node was started with")
    which.add_argument("--state-dir", type=Path, help="the node's state folder")


def _up(arguments: argparse.Namespace) -> int:
    from tasuki.supervisor.node import start_node
    from tasuki.supervisor.post_mortem import why_it_ended

    config = load_config(arguments.config, overrides=arguments.overrides)
    node = start_node(config, resumes=arguments.resume)
    if not arguments.foreground:
        node.detach()
        return 0
    try:
        if node.wait() != 0:
            raise why_it_ended(config)
    finally:
        node.stop()
    return 0


def _down(arguments: argparse.Namespace) -> int:
    from tasuki.supervisor.node import stop_node

    state_dir = arguments.state_dir or load_beside_node(arguments.config).state_dir
    sys.stderr.write("the node is down\n" if stop_node(state_dir) else f"no node runs on {state_dir}\n")
    return 0


def _state(arguments: argparse.Namespace) -> int:
    from tasuki.cli.state import show_state

    return show_state(_running_config(arguments), as_json=arguments.json, must_serve=arguments.serving)


def _watch(arguments: argparse.Namespace) -> int:
    from tasuki.cli.watch import watch

    return watch(_running_config(arguments))


def _train(arguments: argparse.Namespace) -> int:
    from tasuki.cli.train import resume, run

    config_dir = arguments.config.resolve().parent
    train = resume if arguments.resume else run
    config = load_beside_node(arguments.config, overrides=arguments.overrides)
    return train(config, config_dir=config_dir, may_start=not arguments.no_start)


def _plan(arguments: argparse.Namespace) -> int:
    from tasuki.cli.plan import run

    return run(arguments)


def _audit(arguments: argparse.Namespace) -> int:
    from tasuki.cli.audit import run

    return run(arguments.run_path, as_json=arguments.json)


def _certs(arguments: argparse.Namespace) -> int:
    from tasuki.cli.certs import run

    return run(arguments.folder, hosts=arguments.hosts, days=arguments.days, is_fleet=arguments.fleet)


def _doctor(arguments: argparse.Namespace) -> int:
    from tasuki.cli.doctor.command import run

    return run(arguments.config, overrides=arguments.overrides, as_json=arguments.json)


def _track(arguments: argparse.Namespace) -> int:
    from tasuki.cli.track import TRACK, run
    from tasuki.runs.trackers import tracker_environment

    os.environ.update({**tracker_environment(arguments.output_dir / TRACK), **os.environ})
    track = TrackConfig(project=arguments.project, name=arguments.name, online=arguments.online)
    return run(arguments.output_dir, to=arguments.to, track=track, follows=arguments.follow, pipe_fd=arguments.pipe_fd)


def _dashboard(arguments: argparse.Namespace) -> int:
    from tasuki.cli.dashboard.command import run

    return run(arguments.folder, config_path=arguments.config, listen=arguments.listen)


def _supervise(arguments: argparse.Namespace) -> int:
    from tasuki.supervisor.pool import NodePool
    from tasuki.supervisor.services import node_services
    from tasuki.supervisor.supervise import supervise

    configure_logging("supervisor")
    config = load_config(config_path(arguments.state_dir))
    return supervise(
        arguments.state_dir,
        node_services(config),
        lock=StateLock(arguments.lock_fd),
        starter_fd=arguments.starter_fd,
        # By default grpc writes a line for every stranger that fails to make a connection to a port.
        environment={"GRPC_VERBOSITY": "ERROR", **os.environ},
        restart=config.restart,
        make_pool=functools.partial(NodePool, config) if config.memory.pool else None,
    )


def _running_config(arguments: argparse.Namespace) -> NodeConfig:
    """The configuration that the node runs with, which `--set` may have made another than the file's."""
    given = None if arguments.config is None else load_beside_node(arguments.config)
    state_dir: Path = arguments.state_dir if given is None else given.state_dir
    if config_path(state_dir).is_file():
        return load_config(config_path(state_dir))
    if given is None or not state_dir.is_dir():
        raise NodeDown(f"no node runs on {state_dir}; start one with: tasuki up CONFIG", state_dir=state_dir)
    return given  # services that were started one by one


if __name__ == "__main__":
    sys.exit(main())
