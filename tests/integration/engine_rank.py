"""Real SGLang models in TP ranks without an engine around them: quick to start, and open to be poisoned and compared."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tasuki.transport.plan import Slice
from tasuki.transport.verify import ReceivedPiece
from tasuki.v1 import weights_pb2


@dataclass(frozen=True)
class Outcome:
    """What one rank says after a receive: names of parameters that differ from the checkpoint on disk, and what it reported."""

    different: list[str]
    checksums: list[tuple[str, Slice, int]]
    fallback_names: tuple[str, ...]
    copied_bytes: int
    num_constants: int
    error: str = ""


class EngineRanks:
    """Two processes that form one TP group of two, or, the first alone, of one."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def receive(self, folder: Path, published: weights_pb2.PublishedWeights, *, tp_size: int) -> list[Outcome]:
        """Each rank loads the checkpoint in `folder` as SGLang does, poisons every parameter, and receives `published`."""
        address = f"tcp://127.0.0.1:{_free_port()}"
        for tp_rank, pipe in enumerate(self._pipes[:tp_size]):
            pipe.send(_Job(tp_rank, tp_size, address, str(folder), published.SerializeToString()))
        return [self._answer(pipe) for pipe in self._pipes[:tp_size]]

    def _answer(self, pipe: Connection) -> Outcome:
        assert pipe.poll(500), "a rank gave no answer"
        outcome = pipe.recv()
        assert isinstance(outcome, Outcome)
        assert not outcome.error, outcome.error
        return outcome


@dataclass(frozen=True)
class _Job:
    tp_rank: int
    tp_size: int
    address: str
    folder: str
    published: bytes


def pieces_of(outcomes: list[Outcome]) -> list[ReceivedPiece]:
    return [ReceivedPiece(rank, *entry) for rank, outcome in enumerate(outcomes) for entry in outcome.checksums]


@contextmanager
def engine_ranks() -> Iterator[EngineRanks]:
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_run_rank, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield EngineRanks(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run_rank(pipe: Connection) -> None:
    os.environ |= {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_NCCL_SO_PATH": "/nonexistent",
        "OMP_NUM_THREADS": "1",
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(_models_without_a_test()),
    }
    tp_size = 0
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            model = _load(job, is_grouped=job.tp_size == tp_size)
            tp_size = job.tp_size
            pipe.send(_receive(model, weights_pb2.PublishedWeights.FromString(job.published)))
        except Exception:  # noqa: BLE001 - the test that waits for this job shows it
            pipe.send(Outcome([], [], (), 0, 0, error=traceback.format_exc()))


def _models_without_a_test() -> list[str]:
    """Importing all of SGLang's models takes half a minute of a busy machine."""
    sglang = find_spec("sglang")
    assert sglang is not None and sglang.submodule_search_locations is not None
    modules = Path(sglang.submodule_search_locations[0], "srt", "models").glob("*.py")
    return [module.stem for module in modules if module.stem not in ("llama", "qwen2", "qwen3", "qwen3_moe")]


def _load(job: _Job, *, is_grouped: bool) -> Any:
    from sglang.srt import distributed
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import get_model
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    args = ServerArgs(
        model_path=job.folder,
        device="cpu",
        tp_size=job.tp_size,
        dtype="bfloat16",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        grammar_backend="none",
        disable_cuda_graph=True,
        log_level="error",
    )
    set_global_server_args_for_scheduler(args)
    initialize_moe_config(args)
    config = ModelConfig.from_server_args(args)
    if not is_grouped:
        distributed.parallel_state.destroy_model_parallel()
        distributed.parallel_state.destroy_distributed_environment()
        distributed.init_distributed_environment(
            backend="gloo",
            world_size=job.tp_size,
            rank=job.tp_rank,
            distributed_init_method=job.address,
            local_rank=job.tp_rank,
        )
        distributed.initialize_model_parallel(tensor_model_parallel_size=job.tp_size)
    initialize_dp_attention(args, config)
    return get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig(device="cpu"))


def _receive(model: Any, published: weights_pb2.PublishedWeights) -> Outcome:
    import torch

    from tasuki.rollout.receive import WeightReceiver
    from tests.models import poison

    with torch.inference_mode():
        from_disk = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        poison(model)
        receiver = WeightReceiver(model)
        receiver.receive(published, import_timeout_s=10)
        # Once more by the plan alone, which is what every later sync does.
        poison(model)
        received = receiver.receive(published, import_timeout_s=10)
        different = [
            name
            for name, parameter in model.named_parameters()
            if not torch.equal(parameter.view(torch.int16), from_disk[name].view(torch.int16))
        ]
    assert receiver.plan is not None
    return Outcome(
        different=different,
        checksums=list(received.checksums),
        fallback_names=received.fallback_names,
        copied_bytes=received.copied_bytes,
        num_constants=len(receiver.plan.constants),
    )
