"""Connections reported in NCCL's log. NCCL has no call that names the transport it chose."""

from __future__ import annotations

import re
from pathlib import Path

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
