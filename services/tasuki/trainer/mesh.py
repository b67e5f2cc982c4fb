"""The device mesh of the trainer: one axis, `dp`, over which parameters are sharded."""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tasuki.config.gpus import gpu_not_shown
from tasuki.trainer.launch import Launch
from tasuki.weights.gloo_peers import check_gloo_peers

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
