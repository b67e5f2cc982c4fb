"""Trainer ranks whose parameters are DTensors of any placement. They publish them and then stay alive."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_module, distribute_tensor
from transformers import PreTrainedModel

from tasuki.config.trainer_schema import LoraConfig
from tasuki.trainer.backends.fsdp.lora.adapters import add_adapters
from tasuki.trainer.backends.fsdp.lora.merged_weights import MergedWeights
from tasuki.trainer.backends.fsdp.shards import local_shards
from tasuki.v1 import weights_pb2
from tasuki.weights.export import WeightExport
from tests.integration.forked import processes
from tests.models import make_model

_TIMEOUT_S = 240


@contextmanager
def dtensor_ranks(
    kind: str, folder: Path, *, mesh_shape: tuple[int, ...], dims: tuple[int, ...], lora: LoraConfig | None = None
) -> Iterator[weights_pb2.PublishedWeights]:
    """Yields the weights of make_model(kind, seed=1), published by one process per place of the mesh; vectors are cut in their only
    dimension.

    dims: the tensor dimension that each axis of the mesh cuts. lora: adapters whose product is published in the weights.
    """
    num_ranks = torch.Size(mesh_shape).numel()
    pipes, ranks = [], []
    for rank in range(num_ranks):
        ours, theirs = processes.Pipe()
        arguments = (theirs, kind, folder, rank, num_ranks, mesh_shape, dims, lora)
        ranks.append(processes.Process(target=_run_rank, args=arguments, daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        handles = []
        for pipe in pipes:
            assert pipe.poll(_TIMEOUT_S), "a rank published nothing"
            handles.append(weights_pb2.WeightHandle.FromString(pipe.recv_bytes()))
        yield weights_pb2.PublishedWeights(policy_version=1, boot_id=str(folder), handles=handles)
    finally:
        for process in ranks:
            process.kill()
            process.join()


def _run_rank(
    pipe: Connection,
    kind: str,
    folder: Path,
    rank: int,
    num_ranks: int,
    mesh_shape: tuple[int, ...],
    dims: tuple[int, ...],
    lora: LoraConfig | None,
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    model = make_model(kind, seed=1)
    if lora is not None:
        model = _adapted(model, lora)
    _distribute(model, init_device_mesh("cpu", mesh_shape), dims)
    export = WeightExport(
        local_shards(model), rank=rank, num_ranks=num_ranks, dtype=torch.bfloat16, socket_path=folder / f"w{rank}.sock"
    )
    export.publish(1, replaced=MergedWeights(model))
    pipe.send_bytes(export.handle().SerializeToString())
    pipe.poll(None)  # until the test ends


def whole_model(kind: str, lora: LoraConfig | None) -> PreTrainedModel:
    """Returns the unsharded model of the ranks, with the adapters' product added by PEFT."""
    model = make_model(kind, seed=1)
    if lora is not None:
        from peft.tuners.lora import LoraLayer

        adapted = _adapted(make_model(kind, seed=1), lora)
        for name, layer in adapted.named_modules():
            if isinstance(layer, LoraLayer):
                weight = model.get_parameter(f"{name}.weight")
                weight.data += layer.get_delta_weight("default")
    return model


def _adapted(model: PreTrainedModel, lora: LoraConfig) -> PreTrainedModel:
    """Adds adapters of small multiples of 1/64, whose products do not depend on the order of summation."""
    add_adapters(model, lora)
    generator = torch.Generator().manual_seed(2)
    for name, param in model.named_parameters():
        if ".lora_" in name:
            param.data = torch.randint(-4, 5, param.shape, generator=generator).float() / 64
    return model


def _distribute(model: nn.Module, mesh: DeviceMesh, dims: Sequence[int]) -> None:
    def distribute(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for name, param in list(module.named_parameters(recurse=False)):
            placements: list[Placement] = [Shard(min(dim, param.dim() - 1)) for dim in dims]
            sharded: DTensor = distribute_tensor(param.detach(), mesh, placements)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=param.requires_grad))

    distribute_module(model, mesh, distribute)
