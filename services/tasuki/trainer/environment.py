"""Environment variables of the trainer's ranks, set before what reads them is imported."""

from __future__ import annotations

from pathlib import Path

from tasuki.config.fleet_schema import FleetConfig

# Ranks of one node need no network; without these, gloo and NCCL listen on the address of the host's name.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def socket_variables(fleet: FleetConfig | None) -> dict[str, str | None]:
    """Interfaces of collectives; None for a variable that must not be set. NCCL has one for all groups of a process, gloo takes another
    between nodes (backends/fsdp/replicas.py)."""
    if fleet is None or fleet.num_nodes == 1:
        return dict(LOOPBACK)
    return {**LOOPBACK, "NCCL_SOCKET_IFNAME": fleet.interface}


def cache_variables(state_dir: Path) -> dict[str, str]:
    """What FlashAttention-4 reads of the environment when it is imported, so that it keeps compiled kernels in the node's private folder.

    By default it would keep none; its own folder below /tmp could be made by another user, and what is in there is run.
    """
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(state_dir.resolve() / "attention-kernels"),
    }
