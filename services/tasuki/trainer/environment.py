"""Environment variables of the trainer's ranks, set before what reads them is imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasuki.config.fleet_schema import FleetConfig

# Ranks of one node need no network; without these, gloo and NCCL listen on the address of the host's name.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

# Settings of torch.compile. One left in a shell would change log-probs, or switch compiling off, without a word.
_COMPILER = ("TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_", "UNSAFE_SKIP_FSDP_")
# Where it keeps files, and what it tells.
_KEPT_ENDS = ("_DIR", "_LOGS", "_LOG_LEVEL")


def foreign_variables(names: Iterable[str]) -> list[str]:
    """Variables that ranks must not inherit, sorted."""
    return sorted(name for name in names if name.startswith(_COMPILER) and not name.endswith(_KEPT_ENDS))


def socket_variables(fleet: FleetConfig | None) -> dict[str, str | None]:
    """Interfaces of collectives; None for a variable that must not be set. NCCL has one for all groups of a process, gloo takes another
    between nodes (backends/fsdp/replicas.py)."""
    if fleet is None or fleet.num_nodes == 1:
        return dict(LOOPBACK)
    return {**LOOPBACK, "NCCL_SOCKET_IFNAME": fleet.interface}


def cache_variables(state_dir: Path) -> dict[str, str]:
    """What FlashAttention-4 and torch.compile read of the environment, so that they keep compiled kernels in the node's private folder.

    By default the one would keep none, the other below /tmp. A folder there could be made by another user, and what is in there is run.
    """
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(state_dir.resolve() / "attention-kernels"),
        "TORCHINDUCTOR_CACHE_DIR": str(state_dir.resolve() / "compiled-blocks"),
    }


CACHE_VARIABLES = frozenset(cache_variables(Path()))
