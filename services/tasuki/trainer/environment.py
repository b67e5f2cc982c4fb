"""Environment variables of the trainer's ranks, set before the imports that read them."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasuki.config.schema import FleetConfig

# Ranks of one node need no network. By default gloo and NCCL listen on the address of the host's name.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}

# Settings of torch.compile. One inherited from a shell could silently change log-probs or disable compilation.
_COMPILER = ("TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_", "UNSAFE_SKIP_FSDP_")
# Its file locations and logging, which are harmless.
_KEPT_ENDS = ("_DIR", "_LOGS", "_LOG_LEVEL")


def foreign_variables(names: Iterable[str]) -> list[str]:
    """Variables that ranks must not inherit, sorted."""
    return sorted(name for name in names if name.startswith(_COMPILER) and not name.endswith(_KEPT_ENDS))


def socket_variables(fleet: "FleetConfig | None") -> dict[str, str]:
    """Network interfaces of collectives. NCCL has one for all groups of a process, by default its own choice or the user's variable; gloo
    uses another between nodes (replicas.py)."""
    if fleet is None or fleet.num_nodes == 1:
        return dict(LOOPBACK)
    between_nodes = {} if fleet.interface is None else {"NCCL_SOCKET_IFNAME": f"={fleet.interface}"}
    return {"GLOO_SOCKET_IFNAME": LOOPBACK["GLOO_SOCKET_IFNAME"], **between_nodes}


def nccl_log_variables(fleet: "FleetConfig | None", *, path: Path) -> dict[str, str]:
    """Makes NCCL log which transport it chooses between nodes. It logs while it connects, not during collectives."""
    if fleet is None or fleet.num_nodes == 1:
        return {}
    # NCCL expands %h and %p.
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(path.resolve()).replace("%", "%%")}


def cache_variables(state_dir: Path) -> dict[str, str]:
    """Variables that make FlashAttention-4 and torch.compile cache kernels in the node's private folder.

    By default the former caches none, and the latter uses a folder in /tmp that another user could create to have code run.
    """
    return {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(state_dir.resolve() / "attention-kernels"),
        "TORCHINDUCTOR_CACHE_DIR": str(state_dir.resolve() / "compiled-blocks"),
    }


CACHE_VARIABLES = frozenset(cache_variables(Path()))
