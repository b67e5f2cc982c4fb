"""Replicas of a rank's shard on a fleet's other nodes: gradients are summed over them once per optimizer step.

With FSDP2 over a node's ranks this is HSDP (arXiv:2304.11277 sec. 3.2.2). FSDP2's own HSDP crosses nodes in backward: all nodes would
need equally many micro-batches, and a lost node would break any call. Here all other collectives stay within a node.
"""

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tasuki.config.gpus import gpu_not_shown
from tasuki.config.paths import nccl_log_path
from tasuki.config.schema import FleetConfig, NodeConfig
from tasuki.config.trainer_schema import PERFORMANCE_TRAINER_KEYS
from tasuki.rpc.port import peer_credentials
from tasuki.trainer.launch import Launch
from tasuki.trainer.rank_store import FleetStore, join_ranks
from tasuki.weights.gloo_peers import check_gloo_peers, connect_over_nodes
from tasuki.wire.address import local_address_towards
from tasuki.wire.errors import PeerUnavailable, VersionOrder

T = TypeVar("T")
_MEASURED_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
_NUM_MEASUREMENTS = 3
_CONNECT_S = 90.0
"""NCCL gives up a refused connection after a minute, with its cause, but waits forever for a peer that does not connect. gloo waits five
times its timeout."""


class NodeReplicas:
    """The ranks of all nodes that hold the same shard. All make the same calls in the same order."""

    def __init__(self, group: Any, *, fleet: FleetConfig, device: torch.device, log: Path | None = None) -> None:
        """group: a torch process group, ordered by node rank. log: NCCL's log of this group and, later, of others."""
        self._group, self._fleet, self._device, self._log = group, fleet, device, log

    @classmethod
    def connect(cls, store: FleetStore, *, config: NodeConfig, launch: Launch, device: torch.device) -> "NodeReplicas":
        """Waits until the same rank of every node has connected. Raises PeerUnavailable if one does not."""
        fleet = config.fleet
        assert fleet is not None
        timeout = timedelta(seconds=config.coordinator.stage_timeout_s)
        shared = dist.PrefixStore(f"replicate/{launch.local_rank}", store)
        limit_s = min(_CONNECT_S, timeout.total_seconds())
        if device.type == "cuda":
            log = nccl_log_path(config.state_dir, launch.local_rank)
            nccl = partial(_connect_nccl, shared, fleet=fleet, device=device, timeout=timeout)
            return cls(connect_within(limit_s, nccl, fleet=fleet, by="NCCL", log=log), fleet=fleet, device=device, log=log)
        with _lost_peers(fleet):
            own = _gloo_device(fleet)
        gloo = partial(connect_over_nodes, shared, fleet.node_rank, fleet.num_nodes, device=own, timeout=timeout)
        return cls(connect_within(limit_s, gloo, fleet=fleet, by="gloo"), fleet=fleet, device=device)

    @torch.no_grad()
    def check_alike(self, numbers: Mapping[str, float]) -> None:
        """Raises VersionOrder on every node if a number differs between nodes. Collective."""
        signed = [sign * number for number in numbers.values() for sign in (1.0, -1.0)]
        greatest = self._greatest(signed)
        for name, high, low in zip(numbers, greatest[::2], greatest[1::2], strict=True):
            if high != -low:
                raise VersionOrder(
                    f"{name} is {-low:g} to {high:g} on the nodes of the fleet; load the same checkpoint on all of them",
                    have=numbers[name],
                    want=high,
                )

    @torch.no_grad()
    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Sums over all nodes, in place. After an error the content is undefined."""
        with _lost_peers(self._fleet):
            works = [self._group.allreduce([tensor]) for tensor in tensors if tensor.numel()]
            for work in works:
                work.wait()

    @torch.no_grad()
    def share(self, tensors: Sequence[Tensor]) -> None:
        """Gives all nodes the first one's values, in place. Collective."""
        for tensor in tensors:
            tensor.mul_(self._fleet.node_rank == 0)
        self.add_up(tensors)

    @torch.no_grad()
    def measure_rate(self) -> float:
        """Bytes per second that this rank sends in an all-reduce over nodes, the best of a few. Collective."""
        num_bytes = _MEASURED_BYTES[self._device.type]
        tensor = torch.zeros(num_bytes // 4, dtype=torch.float32, device=self._device)
        seconds: list[float] = []
        for _ in range(_NUM_MEASUREMENTS):
            self._greatest([0.0])  # waits until all nodes are connected
            started = time.perf_counter()
            self.add_up([tensor])
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - started)
        del tensor
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # the model is not loaded yet, so nothing else is cached
        num_nodes = self._fleet.num_nodes
        return 2 * (num_nodes - 1) / num_nodes * num_bytes / min(seconds)

    def transport(self) -> str:
        """How all-reduces cross nodes, as NCCL's log names it once one has run; empty if it does not."""
        if self._log is None:
            return "TCP"
        return ", ".join(transports(read_log(self._log)))

    def greatest(self, number: float) -> float:
        """Maximum over all nodes, since rounding may differ with the order of their collectives."""
        return self._greatest([number])[0]

    def close(self) -> None:
        if self._device.type == "cuda":
            self._group.abort()

    def _greatest(self, numbers: Sequence[float]) -> list[float]:
        values = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        with _lost_peers(self._fleet):
            self._group.allreduce([values], options).wait()
        return values.tolist()


def join_nodes(config: NodeConfig, launch: Launch, *, device: torch.device) -> NodeReplicas | None:
    """Connects this rank's replicas once the trainers of all nodes have joined; None on a single node. Raises as join_store."""
    if not is_fleet(config):
        return None
    return NodeReplicas.connect(join_store(config, launch), config=config, launch=launch, device=device)


def is_fleet(config: NodeConfig) -> bool:
    """Whether there are other nodes to train with."""
    return config.fleet is not None and config.fleet.num_nodes > 1


def join_store(config: NodeConfig, launch: Launch) -> FleetStore:
    """Joins the store of this start of all trainers. Raises as join_ranks."""
    assert config.fleet is not None
    return join_ranks(
        config.fleet,
        peer_credentials(config.security),
        num_ranks=launch.num_ranks,
        launch_id=launch.launch_id,
        recipe=_recipe(config),
        timeout_s=config.coordinator.stage_timeout_s,
    )


def _recipe(config: NodeConfig) -> str:
    """Digest of everything that determines results; the model's path may differ, its configuration may not."""
    digest = hashlib.sha256(config.trainer.model_dump_json(exclude={*PERFORMANCE_TRAINER_KEYS, "critic"}).encode())
    critic = config.trainer.critic
    paths = [config.model.path]
    if critic is not None:
        digest.update(critic.model_dump_json(exclude={"path"}).encode())
        paths += [] if critic.path is None else [critic.path]
    for path in paths:
        digest.update((path / "config.json").read_bytes())
    return digest.hexdigest()


def _connect_nccl(store: Any, *, fleet: FleetConfig, device: torch.device, timeout: timedelta) -> Any:
    """NCCL connects in the first collective."""
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group: Any = dist.ProcessGroupNCCL(store, fleet.node_rank, fleet.num_nodes, options)
    group.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.synchronize(device)
    return group


def connect_within(seconds: float, connect: Callable[[], T], *, fleet: FleetConfig, by: str, log: Path | None = None) -> T:
    """Raises PeerUnavailable with the cause if `connect` fails or takes longer. log: of NCCL."""
    try:
        return call_within(seconds, connect)
    except TimeoutError:
        warning = "" if log is None else last_warning(read_log(log))
        cause = f"not all have answered within {seconds:g} s{warning and f' ({warning})'}"
    except RuntimeError as error:
        cause = _cause(error)
    advice = f"set fleet.interface to a network that all nodes share{'' if log is None else f', and see {log}'}"
    raise PeerUnavailable(
        f"node {fleet.node_rank} cannot connect to the other nodes of the fleet {fleet.name} by {by}: {cause}; {advice}",
        peer="node",
    )


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Runs `call` in a thread, which is left behind on TimeoutError: neither NCCL nor gloo can be interrupted while it connects."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            answer.set_exception(error)

    threading.Thread(target=run, name="connect-nodes", daemon=True).start()
    return answer.result(timeout=seconds)


def _gloo_device(fleet: FleetConfig) -> Any:
    """Gloo device of the configured interface, or of the address that routes to the leader."""
    if fleet.interface is not None:
        return dist.ProcessGroupGloo.create_device(interface=fleet.interface)
    return dist.ProcessGroupGloo.create_device(hostname=local_address_towards(fleet.leader))


@contextmanager
def _lost_peers(fleet: FleetConfig) -> Iterator[None]:
    """Converts torch's RuntimeError, raised for any failure of a connection."""
    try:
        yield
    except RuntimeError as error:
        raise PeerUnavailable(
            f"node {fleet.node_rank} lost another of the {fleet.num_nodes} nodes of the fleet {fleet.name}: {_cause(error)}",
            peer="node",
        ) from error


def _cause(error: RuntimeError) -> str:
    """The line that says most: NCCL's last, after torch's place in C++, and gloo's first."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[-1] if lines[0].startswith("NCCL error") else lines[0]


_CHANNEL = re.compile(r"NCCL INFO (?:Channel|CollNet) .* via (\S.*)$", re.MULTILINE)
_DEVICE = re.compile(r"/\d+(?:\(\d+\))?(?=/|$)")
_WARNING = re.compile(r"NCCL WARN (.*)$", re.MULTILINE)


def transports(log: str) -> list[str]:
    """Transports of all channels, without the device's number, sorted: such as "NET/IB/GDRDMA", "NET/Socket" or "P2P/CUMEM".

    log: lines of NCCL_DEBUG=INFO, for example "... NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0".
    """
    return sorted({_DEVICE.sub("", name.strip()) for name in _CHANNEL.findall(log)})


def last_warning(log: str) -> str:
    """The latest warning; empty without one."""
    return next(reversed(_WARNING.findall(log)), "").strip()


def read_log(path: Path) -> str:
    """Empty if NCCL has written nothing."""
    return path.read_text(errors="replace") if path.exists() else ""


_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def start_mesh(device: Literal["cpu", "cuda"], *, launch: Launch, gpu: int, num_threads: int, timeout_s: float) -> DeviceMesh:
    """Joins this launch's process group and returns its 1-D mesh. Sets torch's thread count for the calling thread.

    gpu: of this rank, on "cuda". A collective that waits longer than `timeout_s` for a peer fails. Raises InvalidArgument without the
    GPU, PeerUnavailable if another user's process has taken a rank's place.
    """
    check_gloo_peers()
    if device == "cuda":
        if gpu >= torch.cuda.device_count():
            raise gpu_not_shown("trainer", gpu, num_shown=torch.cuda.device_count())
        torch.cuda.set_device(gpu)
    else:
        torch.set_num_threads(num_threads)
    timeout = timedelta(seconds=timeout_s)
    # Torch's default, a TCP store, is open to every user of the machine.
    store = dist.FileStore(str(launch.store_path), launch.num_ranks)
    store.set_timeout(timeout)
    dist.init_process_group(_BACKENDS[device], store=store, rank=launch.rank, world_size=launch.num_ranks, timeout=timeout)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    # A mesh may create its own group, which does not inherit the timeout. Torch has no public name for this yet:
    # https://github.com/pytorch/pytorch/issues/115121
    dist.distributed_c10d._set_pg_timeout(timeout, mesh.get_group("dp"))
    return mesh


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this rank."""
    return torch.device("cpu") if mesh.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
