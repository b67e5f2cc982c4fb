"""Which GPU each rank of trainer and rollout uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import takewhile

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
