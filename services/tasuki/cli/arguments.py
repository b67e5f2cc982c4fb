"""Arguments of the commands that have many."""

from __future__ import annotations

import argparse
from pathlib import Path

from tasuki.config.paths import RUN_CONFIG, archived_config_path, config_path
from tasuki.planner.node import Strategy
from tasuki.planner.presets import PRESETS

DEFAULT_HOST_GB = 2000.0
FLEET_FLAGS: dict[str, tuple[type, str]] = {
    "name": (str, "name of the fleet"),
    "num_nodes": (int, "number of nodes in the fleet"),
    "node_rank": (int, "rank of this node, from 0"),
    "leader": (str, "HOST:PORT of the fleet on node 0"),
    "attempt": (int, "number of restarts of the job"),
}


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="A.B=VALUE", help="override a key of CONFIG"
    )


def config_file(text: str) -> Path:
    """A node's TOML, or the one in a run's output folder or a state folder."""
    path = Path(text)
    files = (config_path(path), path / RUN_CONFIG, archived_config_path(path)) if path.is_dir() else ()
    return next((file for file in files if file.is_file()), path)


def add_node(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    text = "the file the node was started with, the node's state folder, or the output folder of its run"
    which.add_argument("config", type=config_file, nargs="?", metavar="CONFIG", help=text)
    which.add_argument("--state-dir", type=Path, help="the node's state folder")


def add_fleet_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=config_file, metavar="CONFIG")
    for name, (kind, what) in FLEET_FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, help=f"{what} (default: [fleet] of CONFIG, else the scheduler's variables)")
    parser.add_argument(
        "--grace-s", type=float, default=60.0, metavar="SECONDS", help="time for a run to save after SIGTERM (60)"
    )
    add_overrides(parser)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=config_file, nargs="?", metavar="CONFIG", help="a node's TOML, a model folder or a config.json"
    )
    parser.add_argument("--preset", metavar="NAME", help=f"start from one of {', '.join(PRESETS)}")
    parser.add_argument("--gpus", type=int, dest="num_gpus", metavar="N", help="GPUs of the node")
    parser.add_argument("--gpu-gb", type=float, metavar="GB", help="memory of one GPU, in 10^9 bytes")
    parser.add_argument(
        "--host-gb",
        type=float,
        metavar="GB",
        help=f"memory of the host, in 10^9 bytes (default: {DEFAULT_HOST_GB:g}; for a node on a CPU this machine's)",
    )
    parser.add_argument(
        "--nodes", type=int, dest="num_nodes", metavar="N", help="nodes of the fleet (default: [fleet] num_nodes)"
    )
    parser.add_argument(
        "--network-gbit", type=float, metavar="G", help="network bandwidth of a node over all its cards, in 10^9 bits/s"
    )
    parser.add_argument(
        "--strategy", choices=[*Strategy], help="v0 both resident, v1 relaunch, v2 one stage, v3 staged (default)"
    )
    add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_init_arguments(init: argparse.ArgumentParser) -> None:
    init.add_argument("folder", type=Path, metavar="DIR", help="a folder, in which no file is replaced")
    init.add_argument("--model", help="a Hugging Face model folder, or an id of the hub")
    init.add_argument("--data", type=Path, metavar="FILE", help="the dataset (default: a small sample)")
    init.add_argument("--task", choices=["math", "match", "sft"], help="a number to reach, a text to match, or supervised")
    init.add_argument("--device", choices=["cuda", "cpu"])
    init.add_argument("--gpu-memory-gb", metavar="GB", help="memory of the GPU (default: this machine's)")
