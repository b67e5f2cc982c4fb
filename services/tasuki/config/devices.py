"""GPU names in a configuration, normalized so that they can be compared."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

UUID = "GPU-"
MAX_GPUS = 1024
"""Bound on a node's GPU numbers, to catch typos."""
_MAX_NUMBER = MAX_GPUS - 1


def cpu_threads() -> int:
    """Torch threads of a rank on a CPU: OMP_NUM_THREADS, or 1."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else 1


def _text_of_number(device: object) -> object:
    return str(device) if type(device) is int else device


def _one_name(device: str) -> str:
    """Normalizes a name: numbers without leading zeros, UUIDs in lower case."""
    if not device.isdecimal():
        return f"{UUID}{device.removeprefix(UUID).lower()}"
    number = device.lstrip("0") or "0"
    if len(number) > len(str(_MAX_NUMBER)) or int(number) > _MAX_NUMBER:
        raise ValueError(f"a GPU's number is at most {_MAX_NUMBER}")
    return number


def _distinct(devices: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(devices)) < len(devices):
        raise ValueError("names a GPU twice")
    return devices


Device = Annotated[
    str, BeforeValidator(_text_of_number), Field(pattern=rf"^({UUID}[0-9a-fA-F-]+|[0-9]+)$"), AfterValidator(_one_name)
]
Devices = Annotated[tuple[Device, ...], AfterValidator(_distinct)]
