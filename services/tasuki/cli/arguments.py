"""The command line of `tasuki`."""

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tasuki.config.paths import RUN_CONFIG, archived_config_path, config_path
from tasuki.config.schema import TRACKERS
from tasuki.planner.node import Strategy
from tasuki.planner.presets import PRESETS

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction["_Parser"]

DEFAULT_HOST_GB = 2000.0
FLEET_FLAGS: dict[str, tuple[type, str]] = {
    "name": (str, "name of the fleet"),
    "num_nodes": (int, "number of nodes in the fleet"),
    "node_rank": (int, "rank of this node, from 0"),
    "leader": (str, "HOST:PORT of the fleet on node 0"),
    "attempt": (int, "number of restarts of the job"),
}


_MEANT = {"logs": "dashboard, which shows them", "start": "up", "stop": "down", "run": "train", "ps": "state"}


class _Parser(argparse.ArgumentParser):
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Names the choice that a mistyped value is like, or a command that does what is meant."""
        choices = list(map(str, action.choices or ()))
        if choices and value not in choices:
            meant = _MEANT if isinstance(action, argparse._SubParsersAction) else {}
            close = get_close_matches(str(value), (*choices, *meant), n=1)
            hint = f"; did you mean {meant.get(close[0], close[0])}?" if close else ""
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(choices)}{hint}")


class _Version(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        sys.stdout.write(f"tasuki {version('tasuki')}\n")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """Parses to a namespace with the name of the command, such as "fleet up", as `command`."""
    text = "RL post-training as services that take turns on the same GPUs."
    epilog = "A node's logs are in logs/ of its state folder; tasuki dashboard shows them."
    parser = _Parser(prog="tasuki", description=text, epilog=epilog)
    parser.add_argument("--version", action=_Version, help="print the version and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_node_commands(commands)
    _add_run_commands(commands)
    _add_plan_command(commands)
    _add_machine_commands(commands)
    _add_fleet_commands(commands)
    _add_run_viewers(commands)
    return parser


def config_file(text: str) -> Path:
    """A node's TOML, or the one in a run's output folder or a state folder."""
    path = Path(text)
    files = (config_path(path), path / RUN_CONFIG, archived_config_path(path)) if path.is_dir() else ()
    return next((file for file in files if file.is_file()), path)


def _command(
    commands: "_Commands", name: str, text: str, *, group: str = "", aliases: Sequence[str] = ()
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, aliases=aliases, help=text, description=text)
    parser.set_defaults(command=f"{group}{name}")
    return parser


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    text = "override a key of CONFIG"
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE", help=text)


def _add_node(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    text = "the file the node was started with, the node's state folder, or the output folder of its run"
    which.add_argument("config", type=config_file, nargs="?", metavar="CONFIG", help=text)
    which.add_argument("--state-dir", type=Path, help="the node's state folder")


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_node_commands(commands: "_Commands") -> None:
    up = _command(commands, "up", "start a node: coordinator, trainer and rollout")
    up.add_argument("config", type=config_file, metavar="CONFIG")
    up.add_argument("--foreground", action="store_true", help="stay in the foreground; Ctrl-C stops the node")
    text = "resume where the last node in the state folder ended, instead of starting from the model"
    up.add_argument("--resume", action="store_true", help=text)
    _add_overrides(up)
    _add_node(_command(commands, "down", "stop a node and wait until all of it is gone"))
    state = _command(commands, "state", "show phase, version, services and memory", aliases=["status"])
    _add_node(state)
    _add_json(state)
    state.add_argument("--serving", action="store_true", help="exit with 1 unless all three services answer")
    _add_node(_command(commands, "watch", "follow stages and memory until Ctrl-C"))
    text = "serve a running node's policy to OpenAI clients and agents"
    gateway = _command(commands, "gateway", text, aliases=["serve"])
    _add_node(gateway)
    text = "address to serve at (127.0.0.1:8000); beyond loopback uses the certificate of CONFIG's [security]"
    gateway.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT", help=text)
    gateway.add_argument(
        "--acquire", action="store_true", help="bring the node to phase ROLLOUT first, and again if rollout restarts"
    )
    text = "file with the key of the gateway, closed to other users (default: a new one, which is printed)"
    gateway.add_argument("--key-file", type=Path, metavar="FILE", help=text)


def _add_run_commands(commands: "_Commands") -> None:
    init = _command(commands, "init", "write a configuration, a reward and a sample of data; asks what no flag says")
    init.add_argument("folder", type=Path, metavar="DIR", help="a folder, in which no file is replaced")
    init.add_argument("--model", help="a Hugging Face model folder, or an id of the hub")
    init.add_argument("--data", metavar="DATA", help="a file, or an id of the hub, of the dataset (default: a small sample)")
    init.add_argument("--task", choices=["math", "match", "sft"], help="a number to reach, a text to match, or supervised")
    init.add_argument("--device", choices=["cuda", "cpu"])
    init.add_argument("--gpu-memory-gb", metavar="GB", help="memory of the GPU (default: this machine's)")
    train = _command(commands, "train", "train as set in CONFIG's [train] or [sft] table; start the node if none runs")
    train.add_argument("config", type=Path, metavar="CONFIG", help="also a run's output folder, or its node's state folder")
    text = "resume the run in output_dir from its newest checkpoint, or from the running node if it still has the run; "
    train.add_argument("--resume", action="store_true", help=f"{text}start a new run if there is none")
    train.add_argument("--no-start", action="store_true", help="fail if no node is running")
    _add_overrides(train)
    evaluate = _command(commands, "eval", "repeat a run's evaluation on its exported model, a folder or a checkpoint")
    text = "the run's output folder, the state folder of its node, or its CONFIG"
    evaluate.add_argument("place", type=Path, metavar="RUN", help=text)
    weights = evaluate.add_mutually_exclusive_group()
    weights.add_argument(
        "--model", type=Path, metavar="FOLDER", help="a Hugging Face model folder, or a checkpoint (default: RUN/model)"
    )
    weights.add_argument("--checkpoint", metavar="N|PATH", help="the checkpoint of policy version N, or the one at PATH")
    _add_overrides(evaluate)
    export = _command(commands, "export", "write a checkpoint as a Hugging Face model folder, without a node")
    text = "a checkpoint, or a run's output folder, its node's state folder or CONFIG: the newest one"
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=text)
    export.add_argument(
        "--run", dest="place", type=Path, metavar="RUN", help="its run, or its node's CONFIG (default: the folder it is in)"
    )
    export.add_argument("--output", type=Path, metavar="DIR", help="a new folder (default: model-NAME in the run's folder)")
    export.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="default: the run's")
    config = _command(commands, "config", "print the effective configuration, with the origin of each key")
    config.add_argument("config", type=config_file, metavar="CONFIG")
    _add_overrides(config)
    audit = _command(commands, "audit", "replay a run's journal and check that every invariant held")
    text = "a state folder, an output folder, a journal, or a node's CONFIG"
    audit.add_argument("run_path", type=Path, metavar="RUN", help=text)
    _add_json(audit)


def _add_plan_command(commands: "_Commands") -> None:
    plan = _command(commands, "plan", "predict a node's memory use by stage and suggest changes")
    text = "a node's TOML, a model folder or a config.json"
    plan.add_argument("config", type=config_file, nargs="?", metavar="CONFIG", help=text)
    plan.add_argument("--preset", metavar="NAME", help=f"start from one of {', '.join(PRESETS)}")
    plan.add_argument("--gpus", type=int, dest="num_gpus", metavar="N", help="GPUs of the node")
    plan.add_argument("--gpu-gb", type=float, metavar="GB", help="memory of one GPU, in 10^9 bytes")
    text = f"memory of the host, in 10^9 bytes (default: {DEFAULT_HOST_GB:g}; for a node on a CPU this machine's)"
    plan.add_argument("--host-gb", type=float, metavar="GB", help=text)
    text = "nodes of the fleet (default: [fleet] num_nodes)"
    plan.add_argument("--nodes", type=int, dest="num_nodes", metavar="N", help=text)
    text = "network bandwidth of a node over all its cards, in 10^9 bits/s"
    plan.add_argument("--network-gbit", type=float, metavar="G", help=text)
    text = "v0 both resident, v1 relaunch, v2 one stage, v3 staged (default)"
    plan.add_argument("--strategy", choices=[*Strategy], help=text)
    text = "a run whose generation is measured, of this model, batch and number of GPUs; may be repeated"
    plan.add_argument("--measured", type=config_file, action="append", default=[], metavar="RUN", help=text)
    _add_overrides(plan)
    _add_json(plan)


def _add_machine_commands(commands: "_Commands") -> None:
    text = "create a CA and certificates for ports in a lab; run again to renew the certificates"
    certs = _command(commands, "certs", text)
    certs.add_argument("folder", type=Path, metavar="FOLDER")
    text = "name or address of a node's machine (default: those of the certificate to renew, or this machine)"
    certs.add_argument("--host", dest="hosts", action="append", default=[], metavar="HOST", help=text)
    text = "give the node's certificate the role peer, for the nodes of a fleet"
    certs.add_argument("--fleet", action="store_true", help=text)
    certs.add_argument("--days", type=int, default=90, help="validity of the certificates in days (90)")
    doctor = _command(commands, "doctor", "check the machine, and whether a node would run on it")
    doctor.add_argument("config", type=config_file, nargs="?", metavar="CONFIG")
    doctor.add_argument("--json", action="store_true", help="print a JSON list")
    text = "fail if gradients of a running fleet cross nodes at less than this many 10^9 bits/s"
    doctor.add_argument("--min-gbit", type=float, metavar="G", help=text)
    _add_overrides(doctor)


def _add_fleet_commands(commands: "_Commands") -> None:
    text = "run several nodes as one: start this machine's node, or show all"
    verbs = commands.add_parser("fleet", help=text, description=text).add_subparsers(required=True, metavar="VERB")
    text = "start this machine's node, join the fleet, and stay until either ends"
    up = _command(verbs, "up", text, group="fleet ")
    up.add_argument("config", type=config_file, metavar="CONFIG")
    for name, (kind, what) in FLEET_FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        up.add_argument(flag, type=kind, help=f"{what} (default: [fleet] of CONFIG, else the scheduler's variables)")
    text = "time for a run to save after SIGTERM (60)"
    up.add_argument("--grace-s", type=float, default=60.0, metavar="SECONDS", help=text)
    _add_overrides(up)
    state = _command(verbs, "state", "show a fleet's nodes, phase and stage; run on node 0", group="fleet ")
    _add_node(state)
    _add_json(state)
    state.add_argument("--serving", action="store_true", help="exit with 1 while nodes are missing or the fleet is in no phase")
    _add_overrides(state)


def _add_run_viewers(commands: "_Commands") -> None:
    track = _command(commands, "track", "send a run's metrics to an experiment tracker")
    text = "the run's output folder, the state folder of its node, or its CONFIG"
    track.add_argument("output_dir", type=Path, metavar="RUN", help=text)
    track.add_argument("--to", required=True, choices=TRACKERS)
    track.add_argument("--project", default="tasuki", help="project or experiment (default: tasuki)")
    track.add_argument("--name", help="name of the run (default: the folder's name)")
    track.add_argument("--follow", action="store_true", help="continue until the run ends")
    track.add_argument("--pipe-fd", type=int, help=argparse.SUPPRESS)  # set by `tasuki train`; closes when it ends
    dashboard = _command(commands, "dashboard", "show a node and its run, or a finished run, in a browser")
    text = "a run's output folder, a node's state folder, or its CONFIG; further ones are drawn into the charts of the first"
    dashboard.add_argument("runs", type=Path, nargs="*", metavar="RUN", help=text)
    dashboard.add_argument("--config", type=Path, metavar="CONFIG", help="the file the node was started with")
    text = "runs to draw into the same charts"
    dashboard.add_argument("--compare", type=Path, nargs="+", action="extend", default=[], metavar="RUN", help=text)
    text = "address to serve at (127.0.0.1:8765); beyond loopback uses TLS and roles of CONFIG's [security]"
    dashboard.add_argument("--listen", default="127.0.0.1:8765", metavar="HOST:PORT", help=text)
