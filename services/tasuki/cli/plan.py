"""`tasuki plan`: predicts a node's memory use before it starts, and suggests changes if it does not fit."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from tasuki.cli.arguments import DEFAULT_HOST_GB
from tasuki.cli.config import warn_of_doubts
from tasuki.cli.node_view import open_console
from tasuki.config.checks import fleet_port_problem
from tasuki.config.engine_arguments import uncounted_arguments
from tasuki.config.load import config_of, load_config, put
from tasuki.config.schema import NodeConfig
from tasuki.coordinator import phases
from tasuki.coordinator.planning import plan_table
from tasuki.memory.host import host_memory
from tasuki.models.known import read_model_shape
from tasuki.models.shape import ModelShape
from tasuki.node.model_folder import check_model_folder, check_model_folders, has_weights, with_local_files
from tasuki.planner.advice import Advice, advise, backend_plans
from tasuki.planner.choose import choose
from tasuki.planner.node import GB, MARGIN, Checkpointing, Node, Part, Strategy, gb, node_of
from tasuki.planner.plan import Plan, plan
from tasuki.planner.presets import MODELS, find_preset
from tasuki.planner.residency import expected_seconds, gpu_names, stay_and_leave
from tasuki.planner.trainer_bytes import Traffic, checkpoint_bytes, node_traffic, run_disk
from tasuki.wire.errors import InvalidArgument, NotInstalled
from tasuki.wire.stages import HOLDS, Phase

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
    rates, backends = generation_rates(node, arguments.measured), backend_plans(planned) if node.device == "cuda" else {}
    not_counted = [f"rollout.engine.{name}" for name in uncounted_arguments(node.config.rollout.engine)]
    if arguments.json:
        table = plan_table(planned, advice) | traffic_table(traffic, rate) | {"not_counted": not_counted}
        table["backends"] = {
            name: {"bytes": one.stage(Phase.TRAIN).gpu_bytes, "fits": one.fits} for name, one in backends.items()
        }
        table["generation"] = {f"{num} x TP {tp}": rate for (num, tp), rate in rates.items()}
        sys.stdout.write(json.dumps(table, indent=2) + "\n")
    else:
        show(planned, advice, console=open_console())
        for line in (*backend_lines(backends), *generation_lines(rates), *traffic_lines(traffic, rate, fits=planned.fits)):
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


COLUMNS: dict[str, tuple[Part, ...]] = {
    "trainer": (Part.TRAINER_WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER, Part.EXPORT),
    "step": (Part.LAYERS, Part.WHOLE_GRADIENTS, Part.ACTIVATIONS, Part.LOGITS, Part.TORCH_CACHE),
    "rollout": (Part.ROLLOUT_WEIGHTS,),
    "KV": (Part.KV_CACHE, Part.CUDA_GRAPH, Part.ENGINE_STEP),
    "other": (Part.CONTEXTS,),
}


def show(planned: Plan, advice: Advice, *, console: Console) -> None:
    """Prints the answer, tables of the stages, one for each kind of GPU, and what they say."""
    node = planned.node
    for line in verdict(planned, advice):
        console.print(line, highlight=False, markup=False)
    console.print(headline(node), highlight=False)
    kinds = ", ".join(f"{kind} {_count(count)}" for kind, count in node.model.count_by_kind().items())
    console.print(f"{_count(node.model.num_parameters)} parameters: {kinds}", highlight=False, style="dim")
    alike: dict[str, list[int]] = {}
    for gpu in range(node.num_gpus):
        alike.setdefault(repr([stage.gpus[gpu] for stage in planned.stages]), []).append(gpu)
    for gpus in alike.values():
        console.print(_stage_table(planned, gpu_names(node, gpus), gpus[0]))
    for line in details(planned, advice):
        console.print(line, highlight=False, markup=False)


def _count(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def verdict(planned: Plan, advice: Advice) -> list[str]:
    """Whether the plan fits, and what to change if it does not."""
    node = planned.node
    if planned.fits:
        on_gpu = f"a GPU needs {gb(planned.gpu_peak.gpu_bytes)} of {gb(node.gpu_bytes)} GB, " if node.device == "cuda" else ""
        return [f"It fits: {on_gpu}the host {gb(planned.host_peak.host_bytes)} of {gb(node.host_bytes)} GB."]
    lines = [f"It does NOT fit: {'; '.join(planned.problems())}."]
    for number, rung in enumerate(advice.ladder, start=1):
        peak = rung.plan.gpu_peak if node.device == "cuda" else rung.plan.host_peak
        size = peak.gpu_bytes if node.device == "cuda" else peak.host_bytes
        after = f"{peak.stage} {gb(size)} GB, {'fits' if rung.plan.fits else 'not enough'}"
        lines.append(f"{'Change' if number == 1 else '  then'} {rung.setting}: {rung.old} -> {rung.new}: {after}.")
    if not advice.solves:
        room = "more or larger GPUs" if node.device == "cuda" else "a machine with more memory"
        lines.append(f"No combination of changes that the planner knows makes it fit: use {room}, or a smaller model.")
    return lines


def details(planned: Plan, advice: Advice) -> list[str]:
    """Which stage peaks, what stays and leaves, and the expected seconds of a changeover's stages."""
    node, peak, host = planned.node, planned.gpu_peak, planned.host_peak
    fullest = max(peak.gpus, key=lambda parts: sum(parts.values()))
    parts = ", ".join(f"{part} {gb(size)}" for part, size in sorted(fullest.items(), key=lambda item: -item[1]))
    lines: list[str] = []
    if node.device == "cuda":
        lines.append(f"GPU peak: {peak.stage}, {gb(peak.gpu_bytes)} of {gb(node.gpu_bytes)} GB: {parts}.")
    own = host_memory()
    allowed = f" that {own.limited_by} allows" if own.limited_by is not None and own.total_bytes == node.host_bytes else ""
    lines.append(f"Host peak: {host.stage}, {gb(host.host_bytes)} of {gb(node.host_bytes)} GB{allowed}.")
    num_checkpoints, disk_bytes = run_disk(node)
    if disk_bytes:
        kept = f" and up to {num_checkpoints} checkpoints of {gb(checkpoint_bytes(node))} GB" if num_checkpoints else ""
        lines.append(f"Disk: {gb(disk_bytes)} GB for the model{kept}.")
    if node.trainer.spreads_experts:
        lines.append(_experts(node))
    size = f"{gb(planned.kv_pool.num_bytes)} GB {'on a GPU' if node.device == 'cuda' else 'of a rank'}"
    lines.append(f"KV cache: {planned.kv_pool.num_tokens:,} tokens for each engine, {size}.")
    idle = node.num_gpus - node.config.num_engine_ranks
    if node.device == "cuda" and idle and not node.gpus.names:
        engines = f"{node.config.dp_size} of TP {node.tp_size}"
        lines.append(f"Without an engine: {idle} of {node.num_gpus} GPUs, which idle in ROLLOUT; the engines are {engines}.")
    if node.device == "cuda":
        ratio = "none fits" if advice.max_kv_ratio is None else f"{advice.max_kv_ratio:g}"
        lines.append(f"Largest KV ratio: {ratio} (now {node.config.rollout.kv_ratio:g}).")
    for name, stays, leaves in stay_and_leave(node):
        lines.append(f"{name}: keeps {', '.join(stays) or 'nothing'}; releases {', '.join(leaves) or 'nothing'}.")
    if seconds := expected_seconds(planned):
        for origin, phase in ((Phase.TRAIN, Phase.ROLLOUT), (Phase.ROLLOUT, Phase.TRAIN)):
            times = {stage: 1000 * seconds[stage] for stage in phases.path(HOLDS[origin], phase)}
            parts = ", ".join(f"{stage} {time:.0f}" for stage, time in times.items())
            lines.append(f"To {phase} about {sum(times.values()):.0f} ms, an estimate: {parts}.")
    return lines


def _experts(node: Node) -> str:
    """Memory of experts spread over ranks."""
    sparse = next(model for model in (node.model, node.critic) if model is not None and model.num_experts)
    each, rows = sparse.num_experts // node.trainer.expert_ranks, node.rank_tokens * replace(node, model=sparse).rows_per_token
    return (
        f"Experts: {each} of {sparse.num_experts} on each rank. Counted are {rows:,} rows, the most that can reach one rank: when all "
        f"tokens of all ranks choose its experts. Even routing brings {node.rank_tokens * sparse.experts_per_token:,}."
    )


def backend_lines(plans: Mapping[str, Plan]) -> list[str]:
    """What a step needs on each backend; empty if there is no choice."""
    parts = [
        f"{name} {gb(one.stage(Phase.TRAIN).gpu_bytes)} GB with {one.node.micro_batch_tokens:,} tokens, {one.node.checkpointing}"
        f"{''.join(f', does not fit: {problem}' for problem in one.problems()[:1])}"
        for name, one in plans.items()
    ]
    # docs/benchmarks.md
    known = "a dense 7B in full on two H200s trains 0.96 times as fast on megatron with TP 2, 8 of its layers 1.03 times with 65,536 tokens"
    if any(one.node.model.num_experts for one in plans.values()):
        known = "30B-A3B with LoRA on experts, on two H200s, trains 0.97 times as fast on megatron with EP 2"
    return [f"TRAIN by trainer.backend: {'; '.join(parts)}. Measured: {known}."] if len(parts) > 1 else []


def generation_rates(node: Node, runs: Sequence[Path]) -> dict[tuple[int, int], float | None]:
    """Generated tokens/s by engines and TP: the median of a run's steps after the first; None where no run is given.

    Raises InvalidArgument for a run of another model, device, batch or number of GPUs, one without rates, and two of one split.
    """
    sizes = [1 << power for power in range(node.num_gpus.bit_length()) if node.config.train is not None]
    fitting = [tp for tp in sizes if not (node.num_gpus % tp or node.model.num_heads % tp)]
    rates: dict[tuple[int, int], float | None] = {(node.num_gpus // tp, tp): None for tp in fitting}
    for file in runs:
        from tasuki.runs.folder import read_steps

        config = load_config(file)
        later = [(step.mean_num_tokens, step.seconds.get("generate")) for step in read_steps(file.parent)[1:]]
        generated = [tokens / seconds for tokens, seconds in later if tokens and seconds]
        run, train = node_of(config, gpu_bytes=1, host_bytes=1), config.train
        if train is None or not generated or _batch(run) != _batch(node):
            problem = "has another model, device, batch or number of GPUs than the plan, which needs [train], or no steps after its first"
            raise InvalidArgument("measured", f"{file} {problem}")
        if not 0.0 < (rate := train.prompts_per_step * train.group_size * median(generated)) < math.inf:
            raise InvalidArgument("measured", f"{file.parent / 'metrics.jsonl'} cannot be: {rate:g} tokens/s")
        if rates.get(split := (config.dp_size, config.rollout.tp_size)) is not None:
            raise InvalidArgument(
                "measured", f"{file} measures {split[0]} x TP {split[1]}, which an earlier run does; give one of them"
            )
        rates[split] = rate
    return rates


def _batch(node: Node) -> tuple[object, ...]:
    keys = ("prompts_per_step", "group_size", "max_new_tokens", "oversample", "max_batches")
    return node.model, node.config.device, node.num_gpus, *(getattr(node.config.train, key, None) for key in keys)


def generation_lines(rates: Mapping[tuple[int, int], float | None]) -> list[str]:
    """The splits of the GPUs into engines, fastest first; empty where there is no choice."""
    ordered, best = sorted(rates.items(), key=lambda item: -(item[1] or 0.0)), max(filter(None, rates.values()), default=1.0)
    said = {each: "not measured" if rate is None else f"{rate:,.0f} ({rate / best - 1:.0%})" for each, rate in ordered}
    parts = (f"{num} x TP {tp} {text}" for (num, tp), text in said.items())
    return [f"Generated tokens/s by engines: {', '.join(parts)}."] if len(rates) > 1 else []


def traffic_lines(traffic: Sequence[Traffic], network_gbit: float | None, *, fits: bool) -> list[str]:
    """Traffic between nodes and its expected seconds; empty for one node."""
    lines: list[str] = []
    for number, each in enumerate(traffic):
        took = "" if network_gbit is None else f", {_seconds(each, network_gbit):.2g} s at {network_gbit:g} Gb/s"
        lines.append(f"{'  or' if number else 'Crosses nodes'}, {each.layout}: {gb(each.num_bytes)} GB each way a step{took}.")
    if traffic and not fits:
        lines.append("Every node of a fleet holds the whole model and its optimizer (HSDP): more nodes do not make it fit.")
    return lines


def traffic_table(traffic: Sequence[Traffic], network_gbit: float | None) -> dict[str, Any]:
    """Traffic between nodes; empty for one node."""
    seconds = [None if network_gbit is None else _seconds(each, network_gbit) for each in traffic]
    rows = [{"layout": one.layout, "bytes": one.num_bytes, "seconds": s} for one, s in zip(traffic, seconds, strict=True)]
    return {"node_traffic": rows} if rows else {}


def _seconds(traffic: Traffic, network_gbit: float) -> float:
    """At `network_gbit` 10^9 bits/s over all cards of a node; an estimate without latency and overlap."""
    return traffic.num_bytes / (network_gbit * 10**9 / 8)


def headline(node: Node) -> str:
    """The main settings in one line."""
    where = "CPU" if node.device == "cpu" else f"{node.num_gpus} GPUs of {gb(node.gpu_bytes)} GB"
    engines = f"{node.config.dp_size} x TP {node.tp_size}"
    is_kept = bool(node.kept_layers) and node.checkpointing is not Checkpointing.NONE
    kept = f" ({node.kept_layers} layers kept)" if is_kept else ""
    how = f"LoRA rank {node.lora.rank}" if node.lora is not None else "all parameters"
    how += ", expert parallel" if node.trainer.spreads_experts else ""
    how += ", one base for both services" if node.shares_base else ""
    how += ", merged in place" if node.merges_in_place else ""
    ranks = "rank" if node.num_ranks == 1 else "ranks"
    backend = "FSDP" if node.trainer.backend == "fsdp" else f"Megatron TP {node.trainer.tensor_parallel}"
    return (
        f"{node.model.architecture} on {where}, strategy {node.strategy}: {node.num_ranks} {backend} {ranks}, {how}, "
        f"{node.micro_batch_tokens:,} tokens, checkpointing {node.checkpointing}{kept}; engines {engines}, "
        f"KV ratio {node.config.rollout.kv_ratio:g}"
    )


def _stage_table(planned: Plan, name: str, index: int) -> Table:
    """One row a stage: red where it does not fit, bold at the GPU's peak."""
    node = planned.node
    table = Table(title=f"{name}, GB", title_justify="left", box=None, padding=(0, 1), pad_edge=False)
    is_gpu = node.device == "cuda"
    for heading in ("stage", *COLUMNS, "total", *(["free"] if is_gpu else []), "host"):
        table.add_column(heading, justify="left" if heading == "stage" else "right", no_wrap=True)
    for stage in planned.stages:
        parts = stage.gpus[index]
        total = sum(parts.values())
        sizes = [sum(parts.get(part, 0) for part in column) for column in COLUMNS.values()]
        free = [gb(node.gpu_bytes - total) if total <= node.gpu_bytes else f"-{gb(total - node.gpu_bytes)}"] if is_gpu else []
        cells = [stage.stage, *(gb(size) if size else "" for size in sizes), gb(total), *free, gb(stage.host_bytes)]
        is_over = is_gpu and total + MARGIN > node.gpu_bytes
        table.add_row(*cells, style="red" if is_over else "bold" if stage is planned.gpu_peak else "")
    return table
