"""The command line of `tasuki fleet`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_FLAGS: dict[str, tuple[type, str]] = {
    "name": (str, "name of the fleet"),
    "num_nodes": (int, "number of nodes in the fleet"),
    "node_rank": (int, "rank of this node, from 0"),
    "leader": (str, "HOST:PORT of the fleet on node 0"),
    "attempt": (int, "number of restarts of the job"),
}


def add_fleet_commands(commands: _Commands) -> None:
    text = "run several nodes as one: start this machine's node, or show all"
    fleet = commands.add_parser("fleet", help=text, description=text)
    verbs = fleet.add_subparsers(required=True, metavar="VERB")
    text = "start this machine's node, join the fleet, and stay until either ends"
    up = verbs.add_parser("up", help=text, description=text)
    up.add_argument("config", type=Path, metavar="CONFIG")
    for name, (kind, what) in _FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        up.add_argument(flag, type=kind, help=f"{what} (default: [fleet] of CONFIG, else the scheduler's variables)")
    up.add_argument("--grace-s", type=float, default=60.0, metavar="SECONDS", help="time for a run to save after SIGTERM (60)")
    _add_overrides(up)
    up.set_defaults(run=_up)
    text = "show a fleet's nodes, phase and stage; run on node 0"
    state = verbs.add_parser("state", help=text, description=text)
    which = state.add_mutually_exclusive_group(required=True)
    which.add_argument("config", type=Path, nargs="?", metavar="CONFIG", help="the file the node was started with")
    which.add_argument("--state-dir", type=Path, help="the node's state folder")
    state.add_argument("--json", action="store_true", help="print one JSON object")
    state.add_argument("--serving", action="store_true", help="exit with 1 while nodes are missing or the fleet is in no phase")
    _add_overrides(state)
    state.set_defaults(run=_state)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE", help="override a key of CONFIG"
    )


def _up(arguments: argparse.Namespace) -> int:
    import os

    from tasuki.cli.fleet import fleet_config, up
    from tasuki.wire.errors import InvalidArgument

    if not 0 <= arguments.grace_s < math.inf:
        raise InvalidArgument("--grace-s", f"must be a number of seconds, 0 or more, got {arguments.grace_s:g}")
    flags: dict[str, Any] = {name: getattr(arguments, name) for name in _FLAGS}
    config = fleet_config(arguments.config, overrides=arguments.overrides, flags=flags, environment=os.environ)  # noqa: TID251 - of the scheduler; fleet.environment reads it
    return up(config, grace_s=arguments.grace_s)


def _state(arguments: argparse.Namespace) -> int:
    from tasuki.cli.fleet import UP, show_state
    from tasuki.config.load import load_beside_node, load_config
    from tasuki.config.paths import config_path
    from tasuki.node.exit_report import node_down

    given = None if arguments.config is None else load_beside_node(arguments.config, overrides=arguments.overrides)
    state_dir: Path = arguments.state_dir if given is None else given.state_dir
    if not config_path(state_dir).is_file():
        raise node_down(state_dir, start=UP)
    return show_state(load_config(config_path(state_dir)), as_json=arguments.json, must_serve=arguments.serving)
