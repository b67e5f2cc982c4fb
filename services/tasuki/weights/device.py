"""GPU UUIDs, which are the same in every process and container, and peer access between GPUs."""

from __future__ import annotations

import torch

from tasuki.weights.manifest import Manifest
from tasuki.wire.errors import BadHandle


def device_uuid(device: torch.device) -> str:
    """CUDA's UUID of the GPU, the same in every process and container."""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_reach(manifest: Manifest, device: torch.device) -> None:
    """Raises BadHandle unless `device` can read the GPU that holds the manifest's memory."""
    visible = {device_uuid(torch.device("cuda", index)): index for index in range(torch.cuda.device_count())}
    owner = visible.get(manifest.device_uuid)
    if owner is None or (owner != device.index and not torch.cuda.can_device_access_peer(device, owner)):
        raise BadHandle(
            f"trainer rank {manifest.rank} publishes on GPU {manifest.device_uuid}, which {device} ({device_uuid(device)}) cannot "
            f"read; visible here: {', '.join(visible)}",
            rank=manifest.rank,
            device_uuid=manifest.device_uuid,
        )
