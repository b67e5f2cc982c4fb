"""`tasuki plan`: predicts a node's memory use before it starts, and suggests changes if it does not fit."""

import argparse
import json
import math
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasuki.cli.arguments import DEFAULT_HOST_GB
from tasuki.cli.config import warn_of_doubts
from tasuki.cli.node_view import open_console
from tasuki.cli.plan_report import show, traffic_lines, traffic_table
from tasuki.config.checks import fleet_port_problem
from tasuki.config.engine_arguments import uncounted_arguments
from tasuki.config.load import config_of, load_config, put
from tasuki.config.schema import NodeConfig
from tasuki.coordinator.planning import plan_table
from tasuki.memory.host import host_memory
from tasuki.models.families import read_model_shape
from tasuki.models.shape import ModelShape
from tasuki.node.hub import with_local_files
from tasuki.node.model_folder import check_model_folder, check_model_folders, has_weights
from tasuki.planner.advice import advise
from tasuki.planner.choose import choose
from tasuki.planner.node import GB, Node, Strategy, node_of
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS, find_preset
from tasuki.planner.trainer_bytes import node_traffic
from tasuki.wire.errors import InvalidArgument, NotInstalled

DOES_NOT_FIT = 1
_MAX_GB = 1e9
_PLANNED_PLACE = {"TASUKI_FLEET": "plan", "NODE_RANK": "0", "MASTER_ADDR": "node-0"}
"""The place of a node that no scheduler has placed yet."""


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if the plan fits, else 1."""
    node = planned_node(arguments)
    fleet, num_nodes = node.config.fleet, arguments.num_nodes
    num_nodes = num_nodes if num_nodes is not None else 1 if fleet is None else fleet.num_nodes
    rate = arguments.network_gbit
    if rate is not None and num_nodes == 1:
        raise InvalidArgument("network-gbit", "is the rate between nodes, but this plan has one node: also give --nodes N")
    if rate is not None and not (math.isfinite(rate) and rate > 0):
        raise InvalidArgument("network-gbit", f"must be a rate above 0 in 10^9 bits a second, not {rate:g}")
    traffic = node_traffic(node, num_nodes=num_nodes)
    planned = plan(choose(node))
    advice = advise(planned)
    not_counted = [f"rollout.engine.{name}" for name in uncounted_arguments(node.config.rollout.engine)]
    if arguments.json:
        table = plan_table(planned, advice) | traffic_table(traffic, rate) | {"not_counted": not_counted}
        sys.stdout.write(json.dumps(table, indent=2) + "\n")
    else:
        show(planned, advice, console=open_console())
        for line in traffic_lines(traffic, rate, fits=planned.fits):
            sys.stdout.write(f"{line}\n")
        for key in not_counted:
            sys.stdout.write(f"Not counted: {key}. Its memory is taken from the KV cache or may be missing; try it.\n")
    return 0 if planned.fits else DOES_NOT_FIT


def planned_node(arguments: argparse.Namespace) -> Node:
    """The node of a TOML, a model folder, a config.json or a preset. Raises InvalidArgument naming a missing or wrong setting."""
    path: Path | None = arguments.config
    gpu_gb, host_gb, num_gpus, model = arguments.gpu_gb, arguments.host_gb, arguments.num_gpus, None
    if path is not None and path.suffix == ".toml":
        config = with_local_files(_load(path, arguments), has_weights=False, has_rows=False)
        run = config.train or config.sft
        unread = [str(path) for path in (run.dataset, run.eval_dataset) if path and not path.is_absolute()] if run else []
        if unread:
            sys.stderr.write(f"rows of {' and '.join(unread)} are not read for a plan; tasuki doctor reads them\n")
        if has_weights(config.model.path):
            check_model_folders(config)
            with suppress(NotInstalled):
                if unread:
                    warn_of_doubts(config)
                else:
                    from tasuki.cli.train import check_data  # a plan of a configuration file alone needs no client

                    check_data(config, config_dir=path.resolve().parent)
    else:
        config, model, default_gb = _model_alone(path, arguments)
        if has_weights(config.model.path):
            with suppress(NotInstalled):
                warn_of_doubts(config)
        gpu_gb, num_gpus = default_gb if gpu_gb is None else gpu_gb, num_gpus or config.trainer.num_ranks
    if gpu_gb is None and config.device == "cuda":
        raise InvalidArgument("gpu-gb", "give the memory of a GPU, such as --gpu-gb 141")
    of_host = host_memory().total_bytes if config.device == "cpu" else DEFAULT_HOST_GB * GB
    return node_of(
        config,
        model,
        gpu_bytes=_bytes("gpu-gb", 1.0 if gpu_gb is None else gpu_gb),  # unused on a CPU
        host_bytes=int(of_host) if host_gb is None else _bytes("host-gb", host_gb),
        num_gpus=num_gpus,
        strategy=Strategy(arguments.strategy or Strategy.STAGED),
    )


def _model_alone(path: Path | None, arguments: argparse.Namespace) -> tuple[NodeConfig, ModelShape, float | None]:
    """A node on GPUs with a model's or a preset's settings, the model, and GB of a GPU."""
    if path is None and arguments.preset is None:
        raise InvalidArgument("CONFIG", "give a node's TOML, a model folder, a config.json, or --preset")
    preset = None if arguments.preset is None else find_preset(arguments.preset)
    num_gpus = arguments.num_gpus if arguments.num_gpus is not None else 1 if preset is None else preset.num_gpus
    if num_gpus < 1:
        raise InvalidArgument("gpus", f"must be at least 1, not {num_gpus}")
    table: dict[str, Any] = {"state_dir": ".", "device": "cuda", "trainer": {"num_ranks": num_gpus}}
    for key, value in ({} if preset is None else preset.settings).items():
        put(table, key, value)
    if path is not None:
        if path.is_file() and path.suffix != ".json":
            raise InvalidArgument("CONFIG", f"{path} is neither a node's .toml nor a model's config.json; give one of these")
        if not path.exists():  # perhaps a model of the hub
            path = with_local_files(config_of(table | {"model": {"path": str(path)}}), has_weights=False).model.path
        if has_weights(path, key="model"):
            check_model_folder(path, key="model")
        shape = read_model_shape(path)
    else:
        assert preset is not None
        path, shape = Path(preset.model), MODELS[preset.model]
    config = config_of(table | {"model": {"path": str(path)}}, overrides=arguments.overrides)
    return config, shape, None if preset is None else preset.gpu_bytes / GB


def _load(config: Path, arguments: argparse.Namespace) -> NodeConfig:
    """The node's configuration. A scheduler may set the part of [fleet] that differs between nodes.

    Raises InvalidArgument as load_config, for a preset, and if node 0 could not call one of the services.
    """
    if arguments.preset:
        raise InvalidArgument("preset", "is for a model; a node's TOML has its own settings: use --set A.B=VALUE")
    try:
        node = load_config(config, overrides=arguments.overrides)
    except InvalidArgument as error:
        if not error.metadata["field"].startswith("fleet."):
            raise
        node = _unplaced_node(config, arguments)
    if problem := fleet_port_problem(node):
        key, text = problem
        raise InvalidArgument(key, f"{key} {text}")
    return node


def _unplaced_node(config: Path, arguments: argparse.Namespace) -> NodeConfig:
    from tasuki.cli.fleet import fleet_config

    try:
        return fleet_config(
            config, overrides=arguments.overrides, flags={"num_nodes": arguments.num_nodes}, environment=_PLANNED_PLACE
        )
    except InvalidArgument as error:
        if error.metadata["field"] != "fleet.num_nodes" or "is not set" not in error.message:
            raise
        raise InvalidArgument("nodes", "[fleet] of CONFIG leaves num_nodes to a scheduler: give --nodes N") from error


def _bytes(flag: str, size: float) -> int:
    if not (math.isfinite(size) and size * GB >= 1):
        raise InvalidArgument(flag, f"must be a size above 0 in GB, not {size:g}")
    if size > _MAX_GB:
        raise InvalidArgument(flag, f"must be at most {_MAX_GB:g} GB, not {size:g}")
    return int(size * GB)
