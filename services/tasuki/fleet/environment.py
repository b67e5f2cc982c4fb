"""A node's place in its fleet, from the variables of Slurm, a Kubernetes JobSet or torchrun."""

import re
from collections.abc import Mapping
from typing import Any

from tasuki.wire.errors import InvalidArgument

DEFAULT_PORT = 29400
"""Default port of the leader."""
_NUM_NODES = ("NNODES", "PET_NNODES", "SLURM_NNODES")
_NODE_RANK = ("NODE_RANK", "PET_NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
_HOST = ("MASTER_ADDR", "PET_MASTER_ADDR")
_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
_ATTEMPT = ("TASUKI_ATTEMPT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
_NAME = ("TASUKI_FLEET", "SLURM_JOB_ID", "JOBSET_NAME", "TORCHELASTIC_RUN_ID")


def fleet_table(environment: Mapping[str, str]) -> dict[str, Any]:
    """Keys of [fleet] found in the environment; empty outside a job. The first in the table of docs/guides/several-nodes.md wins.

    Raises InvalidArgument naming a variable that is not a number or a list of hosts.
    """
    found = {
        "num_nodes": _number(environment, _NUM_NODES),
        "node_rank": _number(environment, _NODE_RANK),
        "attempt": _number(environment, _ATTEMPT),
        "name": _first(environment, _NAME),
        "leader": _leader(environment),
    }
    return {key: value for key, value in found.items() if value is not None}


def _leader(environment: Mapping[str, str]) -> str | None:
    host = _first(environment, _HOST)
    if host is None and (hosts := environment.get("SLURM_JOB_NODELIST")):
        host = first_host(hosts)
    if host is None:
        return None
    port = _number(environment, _PORT)
    return f"{f'[{host}]' if ':' in host else host}:{DEFAULT_PORT if port is None else port}"


def first_host(hosts: str) -> str:
    """First host of a Slurm list, such as "gpu-003" of "gpu-[003-010,012],login1". Raises InvalidArgument."""
    found = re.match(r"([^\s,\[\]]+)(?:\[(\d+)[^\]]*\]([^\s,\[\]]*))?(?=,|$)", hosts)
    if found is None:
        raise InvalidArgument("SLURM_JOB_NODELIST", f"{hosts!r} is not a list of hosts; set MASTER_ADDR to the first one")
    return "".join(part or "" for part in found.groups())


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in names if environment.get(name)), None)


def _number(environment: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        return None
    text = environment[name]
    if not (text.isascii() and text.isdecimal()):
        raise InvalidArgument(name, f"is {text!r} in the environment; it must be a whole number, 0 or more")
    return int(text)
