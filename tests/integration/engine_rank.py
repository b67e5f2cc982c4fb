"""Real SGLang models in TP ranks without an engine: quick to start, and accessible for poisoning and comparison."""

import dataclasses
import gc
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tasuki.memory.arena import NativeAllocator
from tasuki.models.tower import TOWER
from tasuki.v1 import weights_pb2
from tasuki.v1.memory_pb2 import PauseRequest, ResumeRequest
from tasuki.v1.types_pb2 import MEMORY_TAG_WEIGHTS
from tasuki.weights.plan import Slice
from tasuki.wire.stages import MemoryTag
from tests.integration.base_rank import share_base
from tests.integration.engine_model import Job, configure, join_group, load_model, models_without_a_test
from tests.integration.forked import processes
from tests.ports import free_port
from tests.received import ReceivedPiece


@dataclass(frozen=True)
class Outcome:
    """Outcome of a receive on one rank: names of parameters that differ from the checkpoint on disk, and the rank's report.

    lost: tensors that are no parameters and differ after a pause of the weights. is_plan_kept: whether the plan outlived the pause.
    is_plan_recorded_ahead: whether it is the one that was recorded, for the expected layout, before anything was received.
    """

    different: list[str]
    lost: list[str]
    num_others: int
    is_plan_kept: bool
    checksums: list[tuple[str, Slice, int]]
    fallback_names: tuple[str, ...]
    copied_bytes: int
    num_constants: int
    is_plan_recorded_ahead: bool = False
    tower_numel: int = 0
    error: str = ""


_NOTHING = Outcome([], [], 0, False, [], (), 0, 0)


class EngineRanks:
    """Processes that form one TP group or, on a CPU, a group of the first process alone."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes
        self._tp_size = 0

    def receive(self, folder: Path, published: weights_pb2.PublishedWeights, *, tp_size: int) -> list[Outcome]:
        """Loads the checkpoint in `folder` as SGLang does, poisons every parameter, and receives `published`, in each rank."""
        address = self._address(tp_size)
        for tp_rank, pipe in enumerate(self._pipes[:tp_size]):
            pipe.send(Job(tp_rank, tp_size, address, str(folder), published.SerializeToString()))
        return [self._answer(pipe) for pipe in self._pipes[:tp_size]]

    def share_base(self, folder: Path, state_dir: Path, *, tp_size: int) -> list[Outcome]:
        """Runs base_rank.share_base in each rank."""
        address = self._address(tp_size)
        for tp_rank, pipe in enumerate(self._pipes[:tp_size]):
            pipe.send(Job(tp_rank, tp_size, address, str(folder), b"", state_dir))
        return [self._answer(pipe) for pipe in self._pipes[:tp_size]]

    def serve(self, socket_dir: Path) -> None:
        """Takes the commands of a front with its socket in this folder, for the models received last."""
        for pipe in self._pipes:
            pipe.send(socket_dir)
            self._answer(pipe)

    def limit_memory(self, num_bytes: int, *, tp_rank: int) -> None:
        """Limits the rank's host arenas to `num_bytes` from now on; 0 lifts the limit."""
        self._pipes[tp_rank].send(num_bytes)
        self._answer(self._pipes[tp_rank])

    def _address(self, tp_size: int) -> str | None:
        """Address at which the ranks form a group of this size; None if the previous job's group has it."""
        if tp_size == self._tp_size:
            return None
        self._tp_size = tp_size
        return f"tcp://127.0.0.1:{free_port()}"

    def _answer(self, pipe: Connection) -> Outcome:
        assert pipe.poll(500), "a rank gave no answer"
        outcome = pipe.recv()
        assert isinstance(outcome, Outcome)
        assert not outcome.error, outcome.error
        return outcome


def check_outcomes(outcomes: list[Outcome], kind: str) -> None:
    """Checks that every rank holds the values on disk, through a plan that is kept, with the padding of the vocabulary."""
    assert [outcome.different for outcome in outcomes] == [[]] * len(outcomes)
    # SGLang's norms of Gemma 2 and Qwen 3.5 compute a buffer while loading, so its own loader handles them at every sync. So does that of
    # gpt-oss with biases that the first rank adds for all, and that of Gemma 4 with constants that are no parameters.
    for tp_rank, outcome in enumerate(outcomes):
        expected = {
            "gemma2": "norm",
            "qwen3_5": "norm",
            "qwen3_5_moe": "norm",
            "qwen3_next": "norm",
            "gpt_oss": "down_proj_bias" if tp_rank else "",
            "gemma4": "layer_scalar",
            "gemma4_dense": "layer_scalar",
        }.get(kind, "")
        assert bool(outcome.fallback_names) is bool(expected)
        assert all(expected in name for name in outcome.fallback_names)
    assert [(outcome.lost, outcome.is_plan_kept) for outcome in outcomes] == [([], True)] * len(outcomes)
    assert all(outcome.is_plan_recorded_ahead for outcome in outcomes)
    # The last rank has the padding rows of the vocabulary, which only a recorded constant fills. Gemma 3's embedding is never split.
    assert (outcomes[-1].num_constants > 0) is (kind not in ("gemma3", "gemma3_vision", "gemma4_dense"))


def pieces_of(outcomes: list[Outcome]) -> list[ReceivedPiece]:
    return [ReceivedPiece(rank, *entry) for rank, outcome in enumerate(outcomes) for entry in outcome.checksums]


@contextmanager
def engine_ranks(num_ranks: int = 2, *, device: str = "cpu") -> Iterator[EngineRanks]:
    """device: "cpu", or "cuda" for one GPU per rank."""
    context = processes if device == "cpu" else multiprocessing.get_context("spawn")
    ours, theirs = zip(*(context.Pipe() for _ in range(num_ranks)), strict=True)
    if device == "cpu":
        starts: list[tuple[Any, tuple[Any, ...]]] = [(_fork_ranks, (theirs,))]
    else:
        starts = [(_run_rank, (pipe, f"{device}:{index}")) for index, pipe in enumerate(theirs)]
    ranks = [context.Process(target=target, args=args, daemon=True) for target, args in starts]
    for rank in ranks:
        rank.start()
    for pipe in theirs:
        pipe.close()
    try:
        yield EngineRanks(list(ours))
    finally:
        for pipe in ours:
            pipe.close()  # ends forked ranks
        for rank in ranks:
            rank.kill()
            rank.join()


def _fork_ranks(pipes: Sequence[Connection]) -> None:
    """Runs the first rank; the others are forked, so that SGLang is imported once."""
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(models_without_a_test()),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
    }
    import_module("tasuki.rollout.sglang")  # before SGLang's loaders, which import kernels
    import_module("sglang.srt.model_loader")
    for pipe in pipes[1:]:
        if os.fork() == 0:
            _run_rank(pipe, "cpu")
            os._exit(0)
    _run_rank(pipes[0], "cpu")


_ranks: list[Any] = []
_lines: list[Any] = []


def _run_rank(pipe: Connection, device: str) -> None:
    import torch

    if device == "cpu":
        torch.set_num_threads(1)
    else:
        os.environ |= {"OMP_NUM_THREADS": "1", "SGLANG_DISABLED_MODEL_ARCHS": ",".join(models_without_a_test())}
        torch.cuda.set_device(device)
    from tasuki.memory.arena import set_host_budget
    from tasuki.rollout.rank import rank_allocator
    from tasuki.rollout.sglang.models import install_latent_attention

    install_latent_attention(device=device)
    allocator = rank_allocator(device)
    model = None
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            outcome = _NOTHING
            if isinstance(job, Job):
                args = configure(job, device=device.partition(":")[0])
                if job.address is not None:
                    join_group(job, backend="gloo" if device == "cpu" else "nccl")
                with allocator.region(MemoryTag.WEIGHTS):
                    model = load_model(args)
                if job.state_dir is not None:
                    outcome = _share_base(model, args, allocator, job.state_dir, rank=job.tp_rank)
                else:
                    outcome = _receive(model, allocator, job)
            elif isinstance(job, Path):
                while _lines:
                    _lines.pop().close()
                _lines.append(_ranks[0].serve(job))
            else:
                set_host_budget(job)
            pipe.send(outcome)
        except Exception:  # noqa: BLE001 - the test that waits for this job shows it
            pipe.send(dataclasses.replace(_NOTHING, error=traceback.format_exc()))


def _loaded_tensors(model: Any) -> list[tuple[str, Any]]:
    """Parameters, the values that Gemma 2's norms compute from theirs while loading, and the absorbed projections of latent attention."""
    derived = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(".gemma_weight")]
    latent = [(name, module) for name, module in model.named_modules() if hasattr(module, "w_kc")]
    absorbed = [(f"{name}.{which}", getattr(module, which)) for name, module in latent for which in ("w_kc", "w_vc")]
    return [*model.named_parameters(), *derived, *absorbed]


def _poison_loaded(model: Any) -> None:
    for _, tensor in _loaded_tensors(model):
        tensor.data.fill_(float("nan"))


def _receive(model: Any, allocator: NativeAllocator, job: Job) -> Outcome:
    import torch

    from tasuki.config.schema import ModelConfig, NodeConfig
    from tasuki.rollout.rank import EngineRank
    from tasuki.rollout.record import published_layout

    folder = Path(job.folder)
    published = weights_pb2.PublishedWeights.FromString(job.published)
    gc.collect()  # models of earlier jobs are cycles: freed later, their memory would be reused
    with torch.inference_mode():
        from_disk = {name: tensor.detach().clone() for name, tensor in _loaded_tensors(model)}
        with allocator.region(MemoryTag.WEIGHTS):
            # Represents the tensors of an attention backend.
            orphan = torch.arange(1, 5000, device=allocator.device)
        rank = EngineRank(model, allocator, rank=job.tp_rank)
        _ranks[:] = [rank]
        _poison_loaded(model)
        rank.memory.pause(PauseRequest(tags=[MEMORY_TAG_WEIGHTS]))
        rank.receiver.record_ahead(published_layout(NodeConfig(state_dir=folder, model=ModelConfig(path=folder))))
        assert allocator.arena(MemoryTag.WEIGHTS).usage().mapped_bytes == 0
        rank.memory.resume(ResumeRequest(tags=[MEMORY_TAG_WEIGHTS]))
        _poison_loaded(model)
        recorded = rank.receiver._recorded
        rank.receiver.receive(published, import_timeout_s=10)
        plan = rank.receiver.plan
        others = _others(model, allocator)
        assert orphan.data_ptr() in {tensor.data_ptr() for tensor, _ in others}
        # Again by the plan alone, as in every later sync, into pages that hold nothing.
        rank.memory.pause(PauseRequest(tags=[MEMORY_TAG_WEIGHTS]))
        rank.memory.resume(ResumeRequest(tags=[MEMORY_TAG_WEIGHTS]))
        if allocator.device == "cpu":  # the content of a GPU's new pages is unspecified
            assert not any(parameter.any() for _, parameter in model.named_parameters() if parameter.nbytes >= 4096)
        _poison_loaded(model)
        received = rank.receiver.receive(published, import_timeout_s=10)
        different = [
            name
            for name, tensor in _loaded_tensors(model)
            if not torch.equal(tensor.view(torch.int16), from_disk[name].view(torch.int16))
        ]
    assert plan is not None
    return Outcome(
        different=different,
        lost=[f"{tensor.dtype} {tuple(tensor.shape)}" for tensor, before in others if not torch.equal(tensor, before)],
        num_others=len(others),
        tower_numel=sum(parameter.numel() for name, parameter in model.named_parameters() if name.startswith(TOWER)),
        is_plan_kept=rank.receiver.plan is plan,
        checksums=list(received.checksums),
        fallback_names=received.fallback_names,
        copied_bytes=received.copied_bytes,
        num_constants=len(plan.constants),
        is_plan_recorded_ahead=rank.receiver._recorded is recorded,
    )


def _share_base(model: Any, args: Any, allocator: NativeAllocator, state_dir: Path, *, rank: int) -> Outcome:
    def load(loader: Any) -> Any:
        with allocator.region(MemoryTag.WEIGHTS):
            return load_model(args, loader)

    folder = Path(args.model_path)
    different = share_base(model, load, state_dir=state_dir, folder=folder, rank=rank, num_ranks=args.tp_size)
    return dataclasses.replace(_NOTHING, different=different)


def _others(model: Any, allocator: NativeAllocator) -> list[tuple[Any, Any]]:
    """Returns every tensor of this process in the weights' arena that is no parameter, with a copy of its values."""
    import torch

    blocks = allocator.blocks(MemoryTag.WEIGHTS)
    parameters = {parameter.data_ptr() for _, parameter in model.named_parameters()}
    found = [
        tensor
        for tensor in gc.get_objects()
        if isinstance(tensor, torch.Tensor) and type(tensor) is torch.Tensor and tensor.data_ptr() not in parameters
    ]
    inside = [one for one in found if any(start <= one.data_ptr() < start + num_bytes for start, num_bytes in blocks)]
    return [(tensor, tensor.clone()) for tensor in inside]
