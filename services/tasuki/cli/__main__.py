"""The `tasuki` command: parses the command line, runs one function, and prints each error as one line."""

import argparse
import faulthandler
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tasuki.cli.arguments import FLEET_FLAGS, make_parser
from tasuki.cli.config import warn_of_doubts, warn_of_settings
from tasuki.config.load import load_beside_node, load_config
from tasuki.config.paths import config_path, training_output_path
from tasuki.config.schema import NodeConfig, TrackConfig
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

USER_ERROR, SERVICE_ERROR, INTERRUPTED = 2, 1, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 1 if a service failed or nobody reads the output; 2 for any other error; 130 after Ctrl-C."""
    arguments = make_parser().parse_args(argv)
    return exit_code_of(lambda: _COMMANDS[arguments.command](arguments))


def exit_code_of(command: Callable[[], int]) -> int:
    """Runs a command. Turns errors into one line and an exit code; a crash in native code prints the Python stack to stderr."""
    faulthandler.enable(file=2)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - open until the end
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


def _up(arguments: argparse.Namespace) -> int:
    from tasuki.cli.train import check_data
    from tasuki.doctor.finding import warn_of_certificate
    from tasuki.node.exit_report import why_it_ended
    from tasuki.node.model_folder import with_local_files
    from tasuki.node.start import check_node_installed, start_node

    check_node_installed()
    config = with_local_files(load_config(arguments.config, overrides=arguments.overrides))
    warn_of_settings(config)
    check_data(config, config_dir=arguments.config.resolve().parent)
    node = start_node(config, resumes=arguments.resume)
    warn_of_certificate(config)
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
    from tasuki.node.processes import stop_node

    state_dir = arguments.state_dir or load_beside_node(arguments.config).state_dir
    sys.stderr.write("the node is down\n" if stop_node(state_dir) else f"no node runs on {state_dir}\n")
    return 0


def _state(arguments: argparse.Namespace) -> int:
    from tasuki.cli.node_view import show_state

    return show_state(_running_config(arguments), as_json=arguments.json, must_serve=arguments.serving)


def _watch(arguments: argparse.Namespace) -> int:
    from tasuki.cli.node_view import watch

    return watch(_running_config(arguments))


def _gateway(arguments: argparse.Namespace) -> int:
    try:
        from tasuki.gateway.server import run
        from tasuki.runs.tokenizer import ModelTokenizer
    except ModuleNotFoundError as error:
        text = f"`tasuki gateway` needs starlette and uvicorn: {install_extras('gateway')}"
        raise NotInstalled(text, packages="starlette,uvicorn", extras="gateway") from error

    config = _running_config(arguments)
    warn_of_doubts(config, ModelTokenizer(config.model.path).tool_doubts())
    return run(config, listen=arguments.listen, key_file=arguments.key_file, acquires=arguments.acquire)


def _train(arguments: argparse.Namespace) -> int:
    from tasuki.cli.train import resume, run, told_how_to_continue
    from tasuki.node.model_folder import with_local_files
    from tasuki.runs.earlier_run import find_run

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


def _certs(arguments: argparse.Namespace) -> int:
    try:
        from tasuki.cli.certs import run
    except ModuleNotFoundError as error:
        text = f"`tasuki certs` needs cryptography: {install_extras('certs')}"
        raise NotInstalled(text, packages="cryptography", extras="certs") from error

    return run(arguments.folder, hosts=arguments.hosts, days=arguments.days, is_fleet=arguments.fleet)


def _fleet_up(arguments: argparse.Namespace) -> int:
    from tasuki.cli.fleet import fleet_config, up
    from tasuki.cli.train import check_data
    from tasuki.node.model_folder import with_local_files

    if not 0 <= arguments.grace_s < math.inf:
        raise InvalidArgument("--grace-s", f"must be a number of seconds, 0 or more, got {arguments.grace_s:g}")
    flags = {name: getattr(arguments, name) for name in FLEET_FLAGS}
    config = with_local_files(
        fleet_config(arguments.config, overrides=arguments.overrides, flags=flags, environment=os.environ)
    )
    if config.fleet is not None and config.fleet.node_rank == 0:  # which trains, and may alone have the data
        check_data(config, config_dir=arguments.config.resolve().parent)
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
    from tasuki.runs.earlier_run import find_run
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

    runs, config = [*arguments.runs, *arguments.compare], arguments.config
    if not runs and config is None:
        raise InvalidArgument("RUN", "give a run's output folder, a node's state folder or its CONFIG")
    folder = runs.pop(0) if arguments.runs or config is None else None
    if folder is not None and folder.is_file():
        folder, config = None, folder
    return run(folder, config_path=config, others=runs, listen=arguments.listen)


def _running_config(arguments: argparse.Namespace) -> NodeConfig:
    """The running node's configuration, which `--set` may have changed from the file's."""
    given = None if arguments.config is None else load_beside_node(arguments.config)
    state_dir: Path = arguments.state_dir if given is None else given.state_dir
    if config_path(state_dir).is_file():
        return load_config(config_path(state_dir))
    if given is None or not state_dir.is_dir():
        raise NodeDown(f"no node runs on {state_dir}; start one with: tasuki up CONFIG", state_dir=state_dir)
    return given  # services were started individually


def _run_of(module: str) -> Callable[[argparse.Namespace], int]:
    """Imports the module only to run its command, since some of them take a second."""
    return lambda arguments: import_module(module).run(arguments)


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "down": _down,
    "state": _state,
    "watch": _watch,
    "gateway": _gateway,
    "train": _train,
    "certs": _certs,
    "fleet up": _fleet_up,
    "fleet state": _fleet_state,
    "track": _track,
    "dashboard": _dashboard,
    "eval": _run_of("tasuki.cli.evaluate"),
    **{name: _run_of(f"tasuki.cli.{name}") for name in ("init", "export", "config", "plan", "audit", "doctor")},
}


if __name__ == "__main__":
    sys.exit(main())
