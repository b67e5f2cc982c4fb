"""Which GPU each rank of trainer and rollout uses."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tasuki.config.schema import NodeConfig


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of a node. A service sees those of both, since it reads or is read by the other, and all processes number them alike.

    names: as the configuration says them; empty for all GPUs that CUDA shows. trainer, rollout: the number of each rank's GPU.
    """

    names: tuple[str, ...]
    trainer: tuple[int, ...]
    rollout: tuple[int, ...]


def gpus_of(config: NodeConfig) -> Gpus:
    """By default rank i of each service is on GPU i."""
    trainer, rollout = config.trainer, config.rollout
    if trainer.devices is None or rollout.devices is None:
        return Gpus((), tuple(range(trainer.num_ranks)), tuple(range(config.num_engine_ranks)))
    names = tuple(dict.fromkeys((*trainer.devices, *rollout.devices)))
    return Gpus(names, *(tuple(names.index(name) for name in devices) for devices in (trainer.devices, rollout.devices)))


def show_gpus(config: NodeConfig) -> None:
    """Has this process and its children see the node's GPUs alone, in that order. To be called before CUDA is used."""
    names = gpus_of(config).names
    if names:
        # Numbers are then those of nvidia-smi.
        os.environ |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(names)}
