"""`tasuki plan`: predicts a node's memory use before it starts, and suggests changes if it does not fit."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tasuki.cli.arguments import DEFAULT_HOST_GB
from tasuki.cli.node_view import open_console
from tasuki.cli.plan_report import as_table, show, traffic_lines, traffic_table
from tasuki.config.checks import fleet_port_problem
from tasuki.config.engine_arguments import uncounted_arguments
from tasuki.config.load import load_config
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import host_memory
from tasuki.node.model_folder import check_planned_folder
from tasuki.planner.advice import advise
from tasuki.planner.layout import GB, Checkpointing, Layout, Strategy
from tasuki.planner.model_shape import read_model_shape
from tasuki.planner.node_plan import node_layout
from tasuki.planner.node_traffic import check_rate, node_traffic
from tasuki.planner.plan import plan
from tasuki.planner.presets import MODELS, find_preset
from tasuki.planner.step_tokens import most_tokens, with_fastest_checkpointing
from tasuki.wire.errors import InvalidArgument

DOES_NOT_FIT = 1
_MAX_GB = 1e9
_FLAGS = {
    "num_gpus": "gpus",
    "tp_size": "tp",
    "micro_batch_tokens": "tokens",
    "context_length": "context",
    "lora_rank": "lora-rank",
}
"""Flags that are counts."""
_PLANNED_PLACE = {"TASUKI_FLEET": "plan", "NODE_RANK": "0", "MASTER_ADDR": "node-0"}
"""The place of a node that no scheduler has placed yet."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """Command-line settings in addition to CONFIG; None if not given."""

    preset: str | None = None
    num_gpus: int | None = None
    gpu_gb: float | None = None
    host_gb: float | None = None
    strategy: str | None = None
    settings: Mapping[str, Any] | None = None
    """Layout fields for a model without a node's TOML."""
    overrides: Sequence[str] = ()
    num_nodes: int | None = None


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if the plan fits, else 1."""
    wishes = _wishes(arguments)
    path: Path | None = arguments.config
    node = _node(path, wishes) if path is not None and path.suffix == ".toml" else None
    layout = layout_of(path, wishes) if node is None else _of_node(node, wishes)
    if wishes.strategy is not None:
        layout = replace(layout, strategy=Strategy(wishes.strategy))
    fleet = None if node is None else node.fleet
    num_nodes = wishes.num_nodes if wishes.num_nodes is not None else 1 if fleet is None else fleet.num_nodes
    check_rate(arguments.network_gbit, num_nodes=num_nodes)
    traffic = node_traffic(layout, num_nodes=num_nodes)
    planned = plan(layout)
    advice = advise(planned)
    not_counted = [] if node is None else [f"rollout.engine.{name}" for name in uncounted_arguments(node.rollout.engine)]
    if arguments.json:
        sys.stdout.write(
            json.dumps(
                {**as_table(planned, advice), **traffic_table(traffic, arguments.network_gbit), "not_counted": not_counted},
                indent=2,
            )
            + "\n"
        )
    else:
        show(planned, advice, console=open_console())
        for line in traffic_lines(traffic, arguments.network_gbit, fits=planned.fits):
            sys.stdout.write(f"{line}\n")
        for key in not_counted:
            sys.stdout.write(f"Not counted: {key}. Its memory is taken from the KV cache or may be missing; try it.\n")
    return 0 if planned.fits else DOES_NOT_FIT


def _wishes(arguments: argparse.Namespace) -> Wishes:
    names = ("tp_size", "micro_batch_tokens", "kv_ratio", "context_length", "checkpointing", "lora_rank")
    settings = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    own = {each.name: getattr(arguments, each.name) for each in fields(Wishes) if each.name != "settings"}
    return Wishes(**own, settings=settings)


def layout_of(model: Path | None, wishes: Wishes) -> Layout:
    """Layout of a model folder, a config.json or a preset. Raises InvalidArgument naming a missing or wrong setting."""
    if model is None and wishes.preset is None:
        raise InvalidArgument("CONFIG", "give a node's TOML, a model folder, a config.json, or --preset")
    if model is not None:
        check_planned_folder(model, key="model")
    shape = None if model is None else read_model_shape(model)
    preset = None if wishes.preset is None else find_preset(wishes.preset)
    if wishes.overrides:
        raise InvalidArgument("set", "overrides keys of a node's TOML, but a model was given")
    if shape is None:
        assert preset is not None
        shape = MODELS[preset.model]
    num_gpus = wishes.num_gpus if wishes.num_gpus is not None else preset.num_gpus if preset else 1
    settings: dict[str, Any] = {}
    if preset is not None:
        # These settings come with emptying torch's cache after each step.
        settings |= {"empties_cache": True, **preset.settings}
    settings |= wishes.settings or {}
    _check_flags({"num_gpus": num_gpus, **(wishes.settings or {})})
    is_open = "checkpointing" not in settings
    settings.setdefault("checkpointing", Checkpointing.OFFLOADED)
    settings.setdefault("num_engines", max(1, num_gpus // max(1, settings.get("tp_size", 1))))
    layout = Layout(
        model=shape,
        num_gpus=num_gpus,
        num_ranks=num_gpus,
        gpu_bytes=_gpu_bytes(wishes, default=preset.gpu_bytes / GB if preset else None),
        host_bytes=_host_bytes(wishes),
        **settings,
    )
    if "micro_batch_tokens" not in settings:
        layout = replace(layout, micro_batch_tokens=most_tokens(layout))
    return with_fastest_checkpointing(layout) if is_open else layout


def _of_node(node: NodeConfig, wishes: Wishes) -> Layout:
    # Unused on a CPU.
    gpu_bytes = _gpu_bytes(wishes, default=1.0 if node.device == "cpu" else None)
    check_planned_folder(node.model.path)
    shape = read_model_shape(node.model.path)
    return node_layout(node, shape, gpu_bytes=gpu_bytes, host_bytes=_host_bytes(wishes, node), num_gpus=wishes.num_gpus)


def _node(config: Path, wishes: Wishes) -> NodeConfig:
    """The node's configuration. A scheduler may set the part of [fleet] that differs between nodes.

    Raises InvalidArgument as load_config, for a setting that the configuration has, and if node 0 could not call one of the services.
    """
    if wishes.settings or wishes.preset:
        flags = ", ".join([*(wishes.settings or {}), *(["preset"] if wishes.preset else [])])
        raise InvalidArgument("CONFIG", f"a node's TOML already sets {flags}: use --set A.B=VALUE")
    try:
        node = load_config(config, overrides=wishes.overrides)
    except InvalidArgument as error:
        if not error.metadata["field"].startswith("fleet."):
            raise
        node = _unplaced_node(config, wishes)
    if problem := fleet_port_problem(node):
        key, text = problem
        raise InvalidArgument(key, f"{key} {text}")
    return node


def _unplaced_node(config: Path, wishes: Wishes) -> NodeConfig:
    from tasuki.cli.fleet import fleet_config

    try:
        return fleet_config(
            config, overrides=wishes.overrides, flags={"num_nodes": wishes.num_nodes}, environment=_PLANNED_PLACE
        )
    except InvalidArgument as error:
        if error.metadata["field"] != "fleet.num_nodes" or "is not set" not in error.message:
            raise
        raise InvalidArgument("nodes", "[fleet] of CONFIG leaves num_nodes to a scheduler: give --nodes N") from error


def _check_flags(settings: Mapping[str, Any]) -> None:
    """Raises InvalidArgument naming a flag whose number makes no sense."""
    for name, flag in _FLAGS.items():
        if settings.get(name, 1) < 1:
            raise InvalidArgument(flag, f"must be at least 1, not {settings[name]}")
    if not 0 < settings.get("kv_ratio", 0.5) < 1:
        raise InvalidArgument("kv-ratio", f"must lie between 0 and 1, not {settings['kv_ratio']}")


def _gpu_bytes(wishes: Wishes, *, default: float | None) -> int:
    size = default if wishes.gpu_gb is None else wishes.gpu_gb
    if size is None:
        raise InvalidArgument("gpu-gb", "give the memory of a GPU, such as --gpu-gb 141")
    return _bytes("gpu-gb", size)


def _host_bytes(wishes: Wishes, node: NodeConfig | None = None) -> int:
    """Host memory to plan with: as asked, or this machine's for a node on a CPU."""
    if wishes.host_gb is None and node is not None and node.device == "cpu":
        return host_memory().total_bytes
    return _bytes("host-gb", DEFAULT_HOST_GB if wishes.host_gb is None else wishes.host_gb)


def _bytes(flag: str, size: float) -> int:
    if not (math.isfinite(size) and size * GB >= 1):
        raise InvalidArgument(flag, f"must be a size above 0 in GB, not {size:g}")
    if size > _MAX_GB:
        raise InvalidArgument(flag, f"must be at most {_MAX_GB:g} GB, not {size:g}")
    return int(size * GB)
