"""Checks of `tasuki doctor CONFIG` beyond the machine: whether this node would start, fit and pass memory, and how its fleet does."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tasuki.client.dataset import Row, read_jsonl
from tasuki.config.load import SLOW_BFLOAT16, load_config, slow_dtypes
from tasuki.config.paths import config_path, nccl_log_path, readable_by_others
from tasuki.config.schema import NodeConfig, SftConfig, TrainConfig
from tasuki.doctor.finding import Finding, Verdict, certificate_findings, checked, fail, is_running, ok, warn
from tasuki.doctor.host import Gpu, check_disk, check_port, check_shared_memory
from tasuki.memory.host import host_memory
from tasuki.models.known import read_model_shape
from tasuki.models.tokenizer import check_tokenizer
from tasuki.node.choose import check_host_budget, check_host_ranks
from tasuki.node.exit_report import node_down
from tasuki.node.model_folder import check_model_folders
from tasuki.node.start import check_node_installed, check_place, check_state_folder
from tasuki.planner.choose import plan_node
from tasuki.planner.node import node_of
from tasuki.planner.trainer_bytes import run_disk
from tasuki.rpc.logs import check_telemetry
from tasuki.rpc.port import check_ports, peer_credentials
from tasuki.runs.earlier_run import reward_folders
from tasuki.runs.rl_training import RlTraining, open_rewards, read_rl, reward_functions
from tasuki.runs.sft_training import SftTraining, read_sft
from tasuki.trackers.adapters import check_installed
from tasuki.trainer.backends import megatron
from tasuki.v1 import fleet_pb2, trainer_pb2
from tasuki.v1.fleet_pb2_grpc import FleetServiceStub
from tasuki.v1.trainer_pb2_grpc import TrainerServiceStub
from tasuki.wire.address import is_beyond_loopback, split_host_port
from tasuki.wire.channel import open_channel
from tasuki.wire.denied_path import denied
from tasuki.wire.errors import PeerUnavailable, TasukiError, from_rpc_error


def node_findings(
    config: NodeConfig, gpus: Sequence[Gpu], *, config_dir: Path, lacking: Mapping[str, int]
) -> Iterable[Finding]:
    """config_dir: of the configuration's file, where rewards are searched. lacking: bytes of weights to fetch from the hub, by key."""
    runs = is_running(config)
    if told := readable_by_others(config.state_dir):
        yield warn("state_dir of others", told, "names and sizes of its files tell of the run")
    yield ok("node", f"runs in {config.state_dir}") if runs else ok("node", "is not running")
    if not runs:
        yield checked("packages of a node", "installed", check_node_installed, key="the environment")
        yield checked("state_dir", str(config.state_dir), lambda: check_state_folder(config), key="state_dir")
    if slow := slow_dtypes(config):
        yield warn("dtypes", f'{" and ".join(slow)} = "bfloat16": {SLOW_BFLOAT16}', "remove the keys")
    if lacking:
        sizes = ", ".join(f"{key}: {num_bytes / 1e9:.2f} GB of weights are not here yet" for key, num_bytes in lacking.items())
        model = warn("model", sizes, "tasuki up and tasuki train fetch them first, into the hub's cache")
    else:
        model = checked("model", str(config.model.path), lambda: check_model_folders(config), key="model.path")
    yield model
    if model.verdict is Verdict.OK:
        yield from (
            warn("tokenizer", doubt, "take the tokenizer that belongs to the model")
            for doubt in check_tokenizer(config.model.path)
        )
    has_port = bool(config.port_targets or config.metrics.listen)
    secured = "TLS" if config.security.cert is not None else "loopback without TLS"
    security = checked("security", secured if has_port else "unix sockets only", lambda: check_ports(config), key="[security]")
    yield security
    if security.verdict is Verdict.OK:
        yield from certificate_findings(config)
    if config.fleet is not None and not runs:
        yield checked("place in the fleet", config.fleet.leader, lambda: check_place(config), key="fleet")
    yield checked("tracing", "as the environment says", check_telemetry, key="the environment")

    if config.trainer.backend == "megatron":
        yield checked("backend", f"megatron-core {megatron.VERSION}", megatron.check_installed, key="trainer.backend")

    def check_trackers() -> None:
        for name in config.track.to:
            check_installed(name, key="track.to")

    yield checked("trackers", ", ".join(config.track.to) or "none", check_trackers, key="track.to")
    has_model = model.verdict is not Verdict.FAIL
    if has_model:
        settings = checked(
            "settings", "fit the model", lambda: node_of(config, gpu_bytes=1, host_bytes=1), key="the configuration"
        )
        has_model = settings.verdict is Verdict.OK
        yield settings
    yield from check_datasets(config, has_model=model.verdict is Verdict.OK)
    if config.train is not None:
        yield check_rewards(config.train, reward_folders(config_dir))
    if has_model:
        yield check_plan(config, gpus, free_bytes=host_memory().total_bytes if runs else host_memory().available_bytes)
    yield check_shared_memory(num_ranks=max(config.trainer.num_ranks, config.num_engine_ranks))
    yield check_passing("cpu")
    if config.device == "cuda" and gpus and not runs:
        yield check_passing("cuda:0")
    num_checkpoints, needed = run_disk(node_of(config, gpu_bytes=1, host_bytes=1)) if has_model else (0, 0)
    folders = {"state_dir": config.state_dir}
    folders |= {} if config.train is None else {"train.output_dir": config.train.output_dir}
    folders |= {} if config.sft is None else {"sft.output_dir": config.sft.output_dir}
    for key, folder in folders.items():
        num_bytes = 0 if key == "state_dir" else needed
        yield check_disk(key, folder, needed_bytes=num_bytes, what=f"{num_checkpoints} checkpoints and the model")
    ports = {f"listen ({service})": target for service, target in config.port_targets.items()}
    ports |= {} if config.metrics.listen is None else {"metrics.listen": config.metrics.listen}
    for key, target in ports.items() if not runs else ():
        yield check_port(key, *split_host_port(target))


_COMPARE = "compare the chat template with eos_token_id of generation_config.json, and with the tools of episodes"


def check_datasets(config: NodeConfig, *, has_model: bool) -> Iterable[Finding]:
    """Checks that a run could start with its data, using the model's tokenizer as `tasuki train` does before its first step."""
    if config.train is not None:
        yield from _check_data("train", config.train, (lambda: read_rl(config)) if has_model else None)
    if (sft := config.sft) is not None:
        yield from _check_data("sft", sft, (lambda: read_sft(config, sft)) if has_model else None)


def _check_data(
    table: str, run: TrainConfig | SftConfig, read: Callable[[], RlTraining | SftTraining] | None
) -> Iterable[Finding]:
    """read: None without a tokenizer."""
    name = f"data of [{table}]"
    for key, path in ((f"{table}.dataset", run.dataset), (f"{table}.eval_dataset", run.eval_dataset)):
        if path is None:
            continue
        try:
            if not path.is_file():
                yield fail(name, f"{path} is not a file", f"change {key}")
                return
        except PermissionError:
            error = denied(path, key=key)
            yield fail(name, f"{error.reason}: {error.message}", f"change {key}, or the permissions")
            return
    if read is None:
        yield ok(name, f"{run.dataset}; rows not checked without the model")
        return
    found: list[RlTraining | SftTraining] = []
    yield checked(name, str(run.dataset), lambda: found.append(read()), key=f"{table}.dataset")
    for training in found:
        yield from (warn(f"completions of [{table}]", doubt, _COMPARE) for doubt in training.doubts)


def check_rewards(train: TrainConfig, folders: Sequence[Path]) -> Finding:
    """Imports the functions of rewards or episodes in a worker process and compares them with the rows, as `tasuki train` does."""
    key, functions = reward_functions(train)

    def check() -> None:
        rows, eval_rows = (_readable_rows(path, train) for path in (train.dataset, train.eval_dataset))
        open_rewards(train, folders, rows, eval_rows).close()

    return checked(f"{key.partition('.')[2]} of [train]", ", ".join(functions), check, key=key)


def _readable_rows(path: Path | None, train: TrainConfig) -> list[Row]:
    """Rows of a dataset; none if it cannot be read, which its own check tells."""
    with suppress(TasukiError):
        return [] if path is None else read_jsonl(path, columns=train.columns)
    return []


PROBE = (sys.executable, "-P", "-m", "tasuki.memory.shared_chunks")
_PROBE_TIMEOUT_S = 120.0
_NO_GPU = 1


def check_plan(config: NodeConfig, gpus: Sequence[Gpu], *, free_bytes: int) -> Finding:
    """Checks that the plan fits the machine as a whole, and its tags the budget, if there is one.

    free_bytes: of the host's memory, with what the node itself holds if it runs.
    """
    name = "memory plan"
    if config.device == "cuda" and not gpus:
        return warn(name, "not made: no GPU is visible from here", "tasuki plan CONFIG --gpu-gb SIZE")
    gpu_bytes = min((gpu.total_bytes for gpu in gpus), default=_NO_GPU)
    try:
        check_host_ranks(config)
        check_host_budget(config)
        planned = plan_node(config, gpu_bytes=gpu_bytes, host_bytes=host_memory().total_bytes)
    except TasukiError as error:
        return fail(name, error.message, f"change {error.metadata.get('field', 'the configuration')}")
    if not planned.fits:
        return fail(name, "; ".join(planned.problems()), "run tasuki plan CONFIG to see what to change")
    if planned.host_peak.host_bytes > free_bytes:
        text = f"needs {planned.host_peak.host_bytes / 1e9:.1f} GB of host memory, {free_bytes / 1e9:.1f} GB are free now"
        return warn(name, text, "end other programs on the machine")
    return ok(name, f"fits; {planned.kv_pool.num_tokens:,} tokens of KV cache")


def check_passing(device: str, *, probe: Sequence[str] = PROBE) -> Finding:
    """Checks that memory passes between processes by file descriptor, as weights do. probe: command that tries it."""
    name = f"memory between processes, {device}"
    try:
        done = subprocess.run([*probe, device], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return fail(name, str(error), "run it separately: python -m tasuki.memory.shared_chunks " + device)
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        advice = "run trainer and rollout in one container with the same GPUs"
        return fail(name, said, advice if device != "cpu" else "allow memfd_create and descriptors over sockets")
    return ok(name, "2 MiB written by one process were read by another")


_TIMEOUT_S = 10.0
_STATE = trainer_pb2.GetTrainerStateRequest()
_MAX_SKEW_S = 1.0
_SLOW_RATE, _NO_RATE = 1e9 / 8, 1e8 / 8
"""Thresholds between machines, in bytes per second: 1 and 0.1 Gb/s."""
_GPU_FACTOR = 10
"""Factor on the thresholds for GPU nodes."""
_GRADIENT_BYTES = 4
_SLOW_ADVICE = "look at fleet.interface, its driver and the route to the other nodes (ip route get, ethtool, logs/nccl0.log)"


def running_config(config: NodeConfig) -> NodeConfig:
    """Configuration of the running node, whose [fleet] `tasuki fleet up` has filled in; `config` if none runs."""
    path = config_path(config.state_dir)
    return load_config(path) if is_running(config) and path.is_file() else config


def fleet_findings(config: NodeConfig, *, min_gbit: float | None = None) -> Iterator[Finding]:
    """Runs every check. If the node is not up, reports only that. min_gbit: rate of gradients that the caller demands, in Gb/s."""
    if config.fleet is None:
        if min_gbit is not None:
            advice = "omit --min-gbit, or name a fleet's node"
            yield fail("fleet gradients", "the node is in no fleet, so there is no rate", advice)
        return
    try:
        fleet, unreachable, trainers = asyncio.run(_look(config))
    except TasukiError as error:
        told = error
        if type(error) is PeerUnavailable:  # usually this node is not up
            no_leader = PeerUnavailable(f"this node is running, but no leader answers at {config.fleet.leader}")
            told = no_leader if is_running(config) else node_down(config.state_dir, start="tasuki fleet up CONFIG")
        advice = f"start all nodes, then try again. Leader: {config.fleet.leader}"
        yield fail("fleet", f"{told.reason}: {told.message}", advice)
        return
    yield from member_findings(fleet)
    num_ports = sum(not target.startswith("unix:") for member in fleet.members for target in _targets(member.node))
    if unreachable:
        found = f"{len(unreachable)} of {num_ports} do not answer: {', '.join(unreachable)}"
        yield fail("fleet ports", found, "open them between nodes")
    else:
        yield ok("fleet ports", f"{num_ports} answer from here")
    yield clock_finding(fleet)
    yield gradients_finding(trainers, config, min_gbit=min_gbit)


async def _look(config: NodeConfig) -> tuple[fleet_pb2.GetFleetResponse, list[str], trainer_pb2.GetTrainerStateResponse]:
    """The fleet, addresses of nodes that do not answer, and the trainers' state with the rate that they measured at start.

    Raises TasukiError.
    """
    assert config.fleet is not None
    credentials = peer_credentials(config.security)
    async with open_channel(config.fleet.leader, credentials=credentials) as channel:
        stub = FleetServiceStub(channel)
        try:
            fleet = await stub.GetFleet(fleet_pb2.GetFleetRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        try:
            trainers = await TrainerServiceStub(channel).GetTrainerState(_STATE, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            trainers = trainer_pb2.GetTrainerStateResponse()
    targets = [target for member in fleet.members for target in _targets(member.node) if not target.startswith("unix:")]
    answers = await asyncio.gather(*(_answers(target, config) for target in targets))
    return fleet, [target for target, answer in zip(targets, answers, strict=True) if not answer], trainers


def _targets(node: fleet_pb2.FleetNode) -> tuple[str, str, str]:
    return node.coordinator_target, node.trainer_target, node.rollout_target


async def _answers(target: str, config: NodeConfig) -> bool:
    """Whether a service of a node answers, over TLS if the fleet uses it."""
    async with open_channel(target, credentials=peer_credentials(config.security)) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
    return True


def member_findings(fleet: fleet_pb2.GetFleetResponse) -> Iterator[Finding]:
    """Checks that all nodes have joined, which a node with other versions, models or settings cannot."""
    found = f"{len(fleet.members)} of {fleet.num_nodes} nodes of {fleet.name!r}, attempt {fleet.attempt}"
    if fleet.ended_by:
        yield fail("fleet", f"has ended: {fleet.ended_by}", "restart the job")
    elif len(fleet.members) < fleet.num_nodes:
        here = {member.node.node_rank for member in fleet.members}
        missing = ", ".join(str(rank) for rank in range(fleet.num_nodes) if rank not in here)
        yield fail("fleet", f"{found}; missing: {missing}", "read the logs of the missing nodes")
    else:
        yield ok("fleet", found)


def clock_finding(fleet: fleet_pb2.GetFleetResponse) -> Finding:
    """Compares the clocks that the nodes' heartbeats carry with the leader's."""
    skews = {member.node.node_rank: member.clock_skew_s for member in fleet.members}
    wrong = [f"node {rank} {skew_s:+.1f} s" for rank, skew_s in skews.items() if abs(skew_s) > _MAX_SKEW_S]
    if wrong:
        found = f"{', '.join(wrong)} against node 0"
        return warn("fleet clock", found, "run chrony or ntpd on all nodes: certificates and journals have times")
    return ok("fleet clock", f"all within {1000 * max(map(abs, skews.values()), default=0.0):.1f} ms of node 0")


def gradients_finding(
    trainers: trainer_pb2.GetTrainerStateResponse, config: NodeConfig, *, min_gbit: float | None = None
) -> Finding:
    """Names the transport of gradients, and rates it. min_gbit: in Gb/s, also where all nodes are on one machine."""
    assert config.fleet is not None
    name = "fleet gradients"
    if config.fleet.num_nodes == 1:
        return ok(name, "stay on the only node")
    if not trainers.HasField("nodes_rate"):
        return fail(name, "no trainer reports its rate to other nodes", "wait until the nodes serve, then try again")
    rate = trainers.nodes_rate
    num_bytes = _GRADIENT_BYTES * read_model_shape(config.model.path).num_parameters
    sent = 2 * (config.fleet.num_nodes - 1) / config.fleet.num_nodes * num_bytes
    by, factor = ("NCCL", _GPU_FACTOR) if config.device == "cuda" else ("gloo", 1)
    over = trainers.nodes_transport or "a transport that its log does not name"
    found = f"{8e-9 * rate:.2f} Gb/s from a node by {by} over {over}; a step sends {sent / 1e9:.2f} GB, in {sent / rate:.2f} s"
    if min_gbit is not None and rate < min_gbit * 1e9 / 8:
        return fail(name, f"{found}; --min-gbit demands {min_gbit:g} Gb/s", _SLOW_ADVICE)
    if is_beyond_loopback(config.fleet.leader) and rate < factor * _SLOW_RATE:
        return (fail if rate < factor * _NO_RATE else warn)(name, found, _SLOW_ADVICE)
    if not trainers.nodes_transport:
        return warn(name, found, f"unset NCCL_DEBUG_SUBSYS and restart all nodes; see {nccl_log_path(config.state_dir, 0)}")
    return ok(name, found)
