"""GPU assignment of trainer and rollout ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tasuki.config.schema import NodeConfig
from tasuki.config.table import UUID
from tasuki.wire.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of a node. Each service sees the GPUs of both, since one reads the other's memory; all processes number them alike.

    names: as configured; empty for all GPUs visible to CUDA. trainer, rollout: GPU number of each rank.
    """

    names: tuple[str, ...]
    trainer: tuple[int, ...]
    rollout: tuple[int, ...]


def gpus_of(config: NodeConfig) -> Gpus:
    """Assigns GPUs to ranks; by default GPU i to rank i of each service."""
    trainer, rollout = config.trainer, config.rollout
    if trainer.devices is None or rollout.devices is None:
        return Gpus((), tuple(range(trainer.num_ranks)), tuple(range(config.num_engine_ranks)))
    names = tuple(dict.fromkeys((*trainer.devices, *rollout.devices)))
    return Gpus(names, *(tuple(names.index(name) for name in devices) for devices in (trainer.devices, rollout.devices)))


def show_gpus(config: NodeConfig) -> None:
    """Restricts this process and its children to the node's GPUs, in order. Must be called once, before CUDA is used.

    If CUDA_VISIBLE_DEVICES is already set, as by a scheduler, the configuration selects from those GPUs.
    Raises InvalidArgument naming the field.
    """
    names = gpus_of(config).names
    if not names:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # number GPUs as nvidia-smi does
    else:
        # Keep CUDA's order, to which these numbers refer.
        field = dict.fromkeys(config.trainer.devices or (), "trainer.devices")
        given = _entries(visible)
        names = tuple(_given(name, given, field=field.get(name, "rollout.devices")) for name in names)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def check_gpu_is_shown(config: NodeConfig) -> None:
    """Raises InvalidArgument if the node needs GPUs and none is visible, as far as can be told without CUDA."""
    if config.device == "cpu":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not _entries(visible):
        problem = f'device = "cuda", but CUDA_VISIBLE_DEVICES="{visible}" hides all GPUs: name some, or unset it'
        raise InvalidArgument("device", problem)
    # A container may lack either the device files (dxg on WSL) or NVML.
    has_file = any(file for name in ("nvidia[0-9]*", "dxg") for file in Path("/dev").glob(name))
    if not has_file and smallest_gpu_bytes() is None:
        raise InvalidArgument("device", 'device = "cuda", but this machine shows no GPU: set device = "cpu", or fix its driver')


def gpu_not_shown(service: str, gpu: int, *, num_shown: int) -> InvalidArgument:
    """Error for a rank whose GPU number exceeds the GPUs it can see."""
    if num_shown == 0:
        problem = 'device = "cuda", but CUDA shows no GPU on this machine: run nvidia-smi to find out why'
        return InvalidArgument("device", problem)
    problem = f"this rank's GPU is number {gpu}, counted from 0, but CUDA shows {num_shown}; by default rank i is on GPU i"
    return InvalidArgument(f"{service}.devices", problem)


def smallest_gpu_bytes() -> int | None:
    """Memory of the machine's smallest GPU, in bytes; None if NVML does not report it."""
    with suppress(ImportError), nvml_session() as nvml:
        sizes = [
            nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index), version=nvml.nvmlMemory_v2)
            for index in range(nvml.nvmlDeviceGetCount())
        ]
        return min((size.total - size.reserved for size in sizes), default=None)
    return None


@contextmanager
def nvml_session() -> Iterator[Any]:
    """Initializes NVML. Raises ImportError if it is missing or broken."""
    import pynvml

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise ImportError("NVML does not start") from error
    try:
        yield nvml
    except nvml.NVMLError as error:
        raise ImportError("NVML does not answer") from error
    finally:
        nvml.nvmlShutdown()


def _entries(visible: str) -> tuple[str, ...]:
    """GPUs visible to CUDA, whose list ends at the first invalid entry, such as "-1" or an empty one."""
    return tuple(takewhile(lambda entry: entry and not entry.startswith("-"), (entry.strip() for entry in visible.split(","))))


def _given(name: str, given: tuple[str, ...], *, field: str) -> str:
    """The entry of CUDA_VISIBLE_DEVICES for the GPU `name`."""
    text = f"CUDA_VISIBLE_DEVICES={','.join(given)}"
    if name.isdecimal():
        if int(name) >= len(given):
            raise InvalidArgument(field, f"names GPU {name}, but {text} leaves {len(given)}, counted from 0")
        return given[int(name)]
    if all(entry.isdecimal() for entry in given) and given:
        return name  # CUDA resolves a UUID itself
    # CUDA accepts a prefix of a UUID.
    pairs = [(entry, entry.lower(), name.lower()) for entry in given]
    same = [
        entry
        for entry, one, other in pairs
        if one.startswith(other) or (one.startswith(UUID.lower()) and other.startswith(one))
    ]
    if len(same) != 1:
        raise InvalidArgument(field, f"names {name}, which is not among {text}")
    return same[0]
