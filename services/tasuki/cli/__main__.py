"""The `tasuki` command: parses the command line, runs one function, and prints each error as one line."""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from tasuki.cli.arguments import (
    FLEET_FLAGS,
    add_fleet_arguments,
    add_init_arguments,
    add_node,
    add_overrides,
    add_plan_arguments,
    config_file,
)
from tasuki.cli.config import warn_of_settings, warn_of_tokenizer
from tasuki.config.load import load_beside_node, load_config
from tasuki.config.paths import config_path, training_output_path
from tasuki.config.schema import TRACKERS, NodeConfig, TrackConfig
from tasuki.wire.denied_path import denied
from tasuki.wire.errors import (
    NO_ROOM,
    DiskFull,
    InvalidArgument,
    NodeDown,
    NotInstalled,
    PathNotFound,
    ServiceFailed,
    TasukiError,
)
from tasuki.wire.extras import install_extras
from tasuki.wire.printable import printable

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

USER_ERROR, SERVICE_ERROR, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 if a service failed or nobody reads the output; 2 for any other error; 130 after Ctrl-C."""
    arguments = _parser().parse_args(argv)
    return exit_code_of(lambda: arguments.run(arguments))


def exit_code_of(command: Callable[[], int]) -> int:
    """Runs a command. Turns errors into one line and an exit code; a crash in native code prints the Python stack to stderr."""
    faulthandler.enable(file=2)
    _open_missing_streams()
    try:
        # Also restores SIGINT, which shells ignore for background jobs.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _interrupted)
        code = command()
        sys.stdout.flush()
        return code
    except TasukiError as error:
        sys.stderr.write(printable(f"tasuki: error {error.reason}: {error.message}") + "\n")
        return SERVICE_ERROR if isinstance(error, ServiceFailed) else USER_ERROR
    except OSError as error:  # an unreadable or unwritable file or folder
        return _code_of_system_error(error)
    except KeyboardInterrupt:
        sys.stderr.write("tasuki: interrupted\n")
        return INTERRUPTED


def _open_missing_streams() -> None:
    """Discards output where the caller has closed standard output or standard error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open until the end


def _code_of_system_error(error: OSError) -> int:
    """Prints the error with its reason and path, or nothing if the reader of standard output has gone."""
    path = error.filename
    if path is None and _discards_output():
        if isinstance(error, BrokenPipeError):
            return SERVICE_ERROR  # as rich does
        path = "standard output"
    text = f"{type(error).__name__}: {error}"
    if error.errno in NO_ROOM:
        text = f"{DiskFull.reason}: {path or 'a file'} cannot be written: {error.strerror}"
    elif path is not None and isinstance(error, PermissionError):
        refused = denied(Path(os.fsdecode(path)))
        text = f"{refused.reason}: {refused.message}"
    elif path is not None:
        text = f"{PathNotFound.reason}: {path}: {error.strerror}"
    sys.stderr.write(printable(f"tasuki: error {text}") + "\n")
    return USER_ERROR


def _discards_output() -> bool:
    """Whether standard output cannot be written, as a line break shows: a failed write leaves nothing to flush. Discards further output."""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return True
    return False


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the command on SIGTERM as on Ctrl-C, so that it stops what it started."""
    raise KeyboardInterrupt


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(f"tasuki {version('tasuki')}\n")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tasuki", description="RL post-training as services that take turns on the same GPUs."
    )
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_node_commands(commands)
    _add_run_commands(commands)
    _add_machine_commands(commands)
    _add_fleet_commands(commands)
    _add_run_viewers(commands)
    return parser


def _add_node_commands(commands: _Commands) -> None:
    up = _command(commands, "up", _up, "start a node: coordinator, trainer and rollout")
    up.add_argument("config", type=config_file, metavar="CONFIG")
    up.add_argument("--foreground", action="store_true", help="stay in the foreground; Ctrl-C stops the node")
    up.add_argument(
        "--resume",
        action="store_true",
        help="resume where the last node in the state folder ended, instead of starting from the model",
    )
    add_overrides(up)
    down = _command(commands, "down", _down, "stop a node and wait until all of it is gone")
    add_node(down)
    state = _command(commands, "state", _state, "show phase, version, services and memory")
    add_node(state)
    state.add_argument("--json", action="store_true", help="print one JSON object")
    state.add_argument("--serving", action="store_true", help="exit with 1 unless all three services answer")
    watch = _command(commands, "watch", _watch, "follow stages and memory until Ctrl-C")
    add_node(watch)


def _add_run_commands(commands: _Commands) -> None:
    text = "write a configuration, a reward and a sample of data; asks what no flag says"
    add_init_arguments(_command(commands, "init", _init, text))
    train = _command(commands, "train", _train, "train as set in CONFIG's [train] or [sft] table; start the node if none runs")
    train.add_argument("config", type=Path, metavar="CONFIG", help="also a run's output folder, or its node's state folder")
    train.add_argument(
        "--resume",
        action="store_true",
        help="resume the run in output_dir from its newest checkpoint, or from the running node if it still has the run; "
        "start a new run if there is none",
    )
    train.add_argument("--no-start", action="store_true", help="fail if no node is running")
    add_overrides(train)
    evaluate = _command(commands, "eval", _eval, "repeat a run's evaluation on its exported model, a folder or a checkpoint")
    evaluate.add_argument(
        "place", type=Path, metavar="RUN", help="the run's output folder, the state folder of its node, or its CONFIG"
    )
    weights = evaluate.add_mutually_exclusive_group()
    weights.add_argument("--model", type=Path, metavar="FOLDER", help="a Hugging Face model folder (default: RUN/model)")
    weights.add_argument("--checkpoint", metavar="N|PATH", help="the checkpoint of policy version N, or the one at PATH")
    add_overrides(evaluate)
    export = _command(commands, "export", _export, "write a checkpoint as a Hugging Face model folder, without a node")
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT")
    export.add_argument("--run", dest="place", type=Path, metavar="RUN", help="its run (default: the folder it is in)")
    export.add_argument("--output", type=Path, metavar="DIR", help="a new folder (default: model-NAME in the run's folder)")
    export.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="default: the run's")
    config = _command(commands, "config", _config, "print the effective configuration, with the origin of each key")
    config.add_argument("config", type=config_file, metavar="CONFIG")
    add_overrides(config)
    plan = _command(commands, "plan", _plan, "predict a node's memory use by stage and suggest changes")
    add_plan_arguments(plan)
    audit = _command(commands, "audit", _audit, "replay a run's journal and check that every invariant held")
    audit.add_argument(
        "run_path", type=Path, metavar="RUN", help="a state folder, an output folder, a journal, or a node's CONFIG"
    )
    audit.add_argument("--json", action="store_true", help="print one JSON object")


def _add_machine_commands(commands: _Commands) -> None:
    certs = _command(
        commands, "certs", _certs, "create a CA and certificates for ports in a lab; run again to renew the certificates"
    )
    certs.add_argument("folder", type=Path, metavar="FOLDER")
    certs.add_argument(
        "--host",
        dest="hosts",
        action="append",
        default=[],
        metavar="HOST",
        help="name or address of a node's machine (default: those of the certificate to renew, or this machine)",
    )
    certs.add_argument(
        "--fleet", action="store_true", help="give the node's certificate the role peer, for the nodes of a fleet"
    )
    certs.add_argument("--days", type=int, default=90, help="validity of the certificates in days (90)")
    doctor = _command(commands, "doctor", _doctor, "check the machine, and whether a node would run on it")
    doctor.add_argument("config", type=config_file, nargs="?", metavar="CONFIG")
    doctor.add_argument("--json", action="store_true", help="print a JSON list")
    doctor.add_argument(
        "--min-gbit",
        type=float,
        metavar="G",
        help="fail if gradients of a running fleet cross nodes at less than this many 10^9 bits/s",
    )
    add_overrides(doctor)


def _add_fleet_commands(commands: _Commands) -> None:
    text = "run several nodes as one: start this machine's node, or show all"
    verbs = commands.add_parser("fleet", help=text, description=text).add_subparsers(required=True, metavar="VERB")
    text = "start this machine's node, join the fleet, and stay until either ends"
    add_fleet_arguments(_command(verbs, "up", _fleet_up, text))
    state = _command(verbs, "state", _fleet_state, "show a fleet's nodes, phase and stage; run on node 0")
    add_node(state)
    state.add_argument("--json", action="store_true", help="print one JSON object")
    state.add_argument("--serving", action="store_true", help="exit with 1 while nodes are missing or the fleet is in no phase")
    add_overrides(state)


def _add_run_viewers(commands: _Commands) -> None:
    track = _command(commands, "track", _track, "send a run's metrics to an experiment tracker")
    track.add_argument(
        "output_dir", type=Path, metavar="RUN", help="the run's output folder, the state folder of its node, or its CONFIG"
    )
    track.add_argument("--to", required=True, choices=TRACKERS)
    track.add_argument("--project", default="tasuki", help="project or experiment (default: tasuki)")
    track.add_argument("--name", help="name of the run (default: the folder's name)")
    track.add_argument("--follow", action="store_true", help="continue until the run ends")
    track.add_argument("--pipe-fd", type=int, help=argparse.SUPPRESS)  # set by `tasuki train`; closes when it ends
    dashboard = _command(commands, "dashboard", _dashboard, "show a node and its run, or a finished run, in a browser")
    shown = dashboard.add_mutually_exclusive_group(required=True)
    shown.add_argument(
        "folder", type=Path, nargs="?", metavar="RUN", help="the run's output folder, a node's state folder, or its CONFIG"
    )
    shown.add_argument("--config", type=Path, metavar="CONFIG", help="the file the node was started with")
    dashboard.add_argument(
        "--compare",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="another run, drawn into the same charts; repeatable",
    )
    dashboard.add_argument(
        "--listen",
        default="127.0.0.1:8765",
        metavar="HOST:PORT",
        help="address to serve at (127.0.0.1:8765); beyond loopback uses TLS and roles of CONFIG's [security]",
    )


def _command(commands: _Commands, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _up(arguments: argparse.Namespace) -> int:
    from tasuki.cli.train import check_data
    from tasuki.doctor.finding import warn_of_certificate
    from tasuki.node.exit_report import why_it_ended
    from tasuki.node.hub import with_local_files
    from tasuki.node.start import start_node

    config = with_local_files(load_config(arguments.config, overrides=arguments.overrides))
    warn_of_settings(config)
    check_data(config)
    node = start_node(config, resumes=arguments.resume)
    warn_of_certificate(config)
    warn_of_tokenizer(config)
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
    from tasuki.node.stop import stop_node

    state_dir = arguments.state_dir or load_beside_node(arguments.config).state_dir
    sys.stderr.write("the node is down\n" if stop_node(state_dir) else f"no node runs on {state_dir}\n")
    return 0


def _state(arguments: argparse.Namespace) -> int:
    from tasuki.cli.node_view import show_state

    return show_state(_running_config(arguments), as_json=arguments.json, must_serve=arguments.serving)


def _watch(arguments: argparse.Namespace) -> int:
    from tasuki.cli.node_view import watch

    return watch(_running_config(arguments))


def _init(arguments: argparse.Namespace) -> int:
    from tasuki.cli.init import run

    return run(arguments)


def _train(arguments: argparse.Namespace) -> int:
    from tasuki.cli.train import resume, run, told_how_to_continue
    from tasuki.node.hub import with_local_files
    from tasuki.runs.recorded_run import find_run

    train = resume if arguments.resume else run
    if arguments.config.is_dir():
        found = find_run(arguments.config, overrides=arguments.overrides)
        config, config_dir = found.config, Path(*found.folders[-1:])
    else:
        config_dir = arguments.config.resolve().parent
        config = with_local_files(load_beside_node(arguments.config, overrides=arguments.overrides))
    warn_of_settings(config)
    with told_how_to_continue(config, arguments.config, arguments.overrides):
        return train(config, config_dir=config_dir, may_start=not arguments.no_start)


def _eval(arguments: argparse.Namespace) -> int:
    from tasuki.cli.evaluate import run

    return run(arguments.place, model=arguments.model, checkpoint=arguments.checkpoint, overrides=arguments.overrides)


def _export(arguments: argparse.Namespace) -> int:
    from tasuki.cli.export import run

    return run(arguments.checkpoint, place=arguments.place, output=arguments.output, dtype=arguments.dtype)


def _config(arguments: argparse.Namespace) -> int:
    from tasuki.cli.config import show_config

    return show_config(arguments.config, overrides=arguments.overrides)


def _plan(arguments: argparse.Namespace) -> int:
    from tasuki.cli.plan import run

    return run(arguments)


def _audit(arguments: argparse.Namespace) -> int:
    from tasuki.cli.audit import run

    return run(arguments.run_path, as_json=arguments.json)


def _certs(arguments: argparse.Namespace) -> int:
    try:
        from tasuki.cli.certs import run
    except ModuleNotFoundError as error:
        text = f"`tasuki certs` needs cryptography: {install_extras('certs')}"
        raise NotInstalled(text, packages="cryptography", extras="certs") from error

    return run(arguments.folder, hosts=arguments.hosts, days=arguments.days, is_fleet=arguments.fleet)


def _doctor(arguments: argparse.Namespace) -> int:
    from tasuki.cli.doctor import run

    return run(arguments.config, overrides=arguments.overrides, as_json=arguments.json, min_gbit=arguments.min_gbit)


def _fleet_up(arguments: argparse.Namespace) -> int:
    from tasuki.cli.fleet import fleet_config, up
    from tasuki.cli.train import check_data
    from tasuki.node.hub import with_local_files

    if not 0 <= arguments.grace_s < math.inf:
        raise InvalidArgument("--grace-s", f"must be a number of seconds, 0 or more, got {arguments.grace_s:g}")
    flags = {name: getattr(arguments, name) for name in FLEET_FLAGS}
    config = with_local_files(
        fleet_config(arguments.config, overrides=arguments.overrides, flags=flags, environment=os.environ)
    )
    if config.fleet is not None and config.fleet.node_rank == 0:  # which trains, and may alone have the data
        check_data(config)
    return up(config, grace_s=arguments.grace_s)


def _fleet_state(arguments: argparse.Namespace) -> int:
    from tasuki.cli.fleet import UP, show_state
    from tasuki.node.exit_report import node_down

    given = None if arguments.config is None else load_beside_node(arguments.config, overrides=arguments.overrides)
    state_dir: Path = arguments.state_dir if given is None else given.state_dir
    if not config_path(state_dir).is_file():
        raise node_down(state_dir, start=UP)
    return show_state(load_config(config_path(state_dir)), as_json=arguments.json, must_serve=arguments.serving)


def _track(arguments: argparse.Namespace) -> int:
    from tasuki.runs.recorded_run import find_run
    from tasuki.trackers.adapters import tracker_environment
    from tasuki.trackers.sending import TRACK, run

    output_dir: Path = arguments.output_dir
    if output_dir.is_file() or training_output_path(output_dir).is_file():
        output_dir = find_run(output_dir).output_dir
    os.environ.update({**tracker_environment(output_dir / TRACK), **os.environ})
    track = TrackConfig(to=(arguments.to,), project=arguments.project, name=arguments.name)
    return run(output_dir, to=arguments.to, track=track, follows=arguments.follow, pipe_fd=arguments.pipe_fd)


def _dashboard(arguments: argparse.Namespace) -> int:
    from tasuki.dashboard.server import run

    folder, config = arguments.folder, arguments.config
    if folder is not None and folder.is_file():
        folder, config = None, folder
    return run(folder, config_path=config, others=arguments.compare, listen=arguments.listen)


def _running_config(arguments: argparse.Namespace) -> NodeConfig:
    """The running node's configuration, which `--set` may have changed from the file's."""
    given = None if arguments.config is None else load_beside_node(arguments.config)
    state_dir: Path = arguments.state_dir if given is None else given.state_dir
    if config_path(state_dir).is_file():
        return load_config(config_path(state_dir))
    if given is None or not state_dir.is_dir():
        raise NodeDown(f"no node runs on {state_dir}; start one with: tasuki up CONFIG", state_dir=state_dir)
    return given  # services were started individually


if __name__ == "__main__":
    sys.exit(main())
