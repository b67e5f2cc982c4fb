"""Which GPU each rank of trainer and rollout uses."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from tasuki.config.devices import UUID
from tasuki.config.schema import NodeConfig
from tasuki.wire.errors import InvalidArgument


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
    """Has this process and its children see the node's GPUs alone, in that order. To be called before CUDA is used, once.

    Where CUDA_VISIBLE_DEVICES is set already, by a scheduler that gave us some of the machine's GPUs, the configuration names some of
    those. Raises InvalidArgument naming the field.
    """
    names = gpus_of(config).names
    if not names:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # numbers are then those of nvidia-smi
    else:
        # The order stays: it is the one that these numbers were given in.
        field = dict.fromkeys(config.trainer.devices or (), "trainer.devices")
        given = _entries(visible)
        names = tuple(_given(name, given, field=field.get(name, "rollout.devices")) for name in names)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def check_gpu_is_shown(config: NodeConfig) -> None:
    """Raises InvalidArgument for a node on GPUs where this machine shows none, as far as that can be known without CUDA."""
    if config.device == "cpu":
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not _entries(visible):
        raise InvalidArgument(
            "device", f'device = "cuda", but CUDA_VISIBLE_DEVICES="{visible}" leaves no GPU: name some, or unset it'
        )
    # A container may lack either: the files of a GPU (dxg is that of WSL), or NVML.
    has_file = any(file for name in ("nvidia[0-9]*", "dxg") for file in Path("/dev").glob(name))
    if not has_file and not _num_gpus_of_nvml():
        raise InvalidArgument(
            "device", 'device = "cuda", but this machine shows no GPU: set device = "cpu", or see to its driver'
        )


def gpu_not_shown(service: str, gpu: int, *, num_shown: int) -> InvalidArgument:
    """What is wrong when a rank finds fewer GPUs than its number asks for."""
    if num_shown == 0:
        return InvalidArgument("device", 'device = "cuda", but CUDA shows no GPU on this machine: nvidia-smi may say why')
    problem = f"this rank's GPU is number {gpu}, counted from 0, but CUDA shows {num_shown}; by default rank i is on GPU i"
    return InvalidArgument(f"{service}.devices", problem)


def smallest_gpu_bytes() -> int | None:
    """Memory that programs can have of the machine's smallest GPU; None where NVML does not say."""
    with suppress(ImportError), _nvml() as nvml:
        sizes = [
            nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index), version=nvml.nvmlMemory_v2)
            for index in range(nvml.nvmlDeviceGetCount())
        ]
        return min((size.total - size.reserved for size in sizes), default=None)
    return None


def _num_gpus_of_nvml() -> int:
    """0 also where NVML is not there."""
    with suppress(ImportError), _nvml() as nvml:
        return nvml.nvmlDeviceGetCount()
    return 0


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, started. Raises ImportError where it is not there, or does not work."""
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
    """The GPUs that CUDA shows: its list ends at what is no GPU, such as "-1" or nothing."""
    return tuple(takewhile(lambda entry: entry and not entry.startswith("-"), (entry.strip() for entry in visible.split(","))))


def _given(name: str, given: tuple[str, ...], *, field: str) -> str:
    """The entry of CUDA_VISIBLE_DEVICES that is the GPU `name`."""
    text = f"CUDA_VISIBLE_DEVICES={','.join(given)}"
    if name.isdecimal():
        if int(name) >= len(given):
            raise InvalidArgument(field, f"names GPU {name}, but {text} leaves {len(given)}, counted from 0")
        return given[int(name)]
    if all(entry.isdecimal() for entry in given) and given:
        return name  # which number it has is CUDA's to know
    same = [entry for entry in given if _is_same(entry.lower(), name.lower())]
    if len(same) != 1:
        raise InvalidArgument(field, f"names {name}, which is not among {text}")
    return same[0]


def _is_same(entry: str, name: str) -> bool:
    """Whether two UUIDs are one GPU's: CUDA takes the beginning of one for all of it."""
    return entry.startswith(name) or (entry.startswith(UUID.lower()) and name.startswith(entry))
