"""Arenas in host memory: a sealed memfd, mapped writable by the trainer rank that owns it and read-only by everyone else."""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Sequence

import torch

from tasuki.transport.header import ArenaState, Header, create_sealed, map_sealed
from tasuki.transport.manifest import Entry, Manifest
from tasuki.transport.weight_arena import WeightArena
from tasuki.v1 import weights_pb2
from tasuki.wire.errors import BadHandle


def create_arena(manifest: Manifest) -> WeightArena:
    """A new arena of the manifest's size."""
    mapping, fd = create_sealed(f"tasuki-weights-{manifest.rank}", manifest.arena_bytes)
    arena = _arena(manifest, mapping, fds=[fd], is_writable=True)
    arena.header.write_state(ArenaState.EMPTY)
    return arena


def map_arena(manifest: Manifest, fds: Sequence[int]) -> WeightArena:
    """A peer's arena, read-only. Raises BadHandle unless there is one memfd of the manifest's size that nobody can resize."""
    if len(fds) != 1:
        raise BadHandle(f"rank {manifest.rank} sent {len(fds)} descriptors, not 1", rank=manifest.rank)
    return _arena(manifest, map_sealed(fds[0], manifest.arena_bytes, rank=manifest.rank), fds=[], is_writable=False)


def _arena(manifest: Manifest, mapping: mmap.mmap, *, fds: Sequence[int], is_writable: bool) -> WeightArena:
    return WeightArena(
        manifest,
        kind=weights_pb2.HANDLE_KIND_HOST_MEMFD,
        header=Header(manifest, mapping),
        tensors=[_tensor_of(mapping, entry, is_writable=is_writable) for entry in manifest.entries],
        fds=fds,
        # Unmapped once the last tensor that lies in the mapping is gone.
        release=lambda: None,
    )


def _tensor_of(mapping: mmap.mmap, entry: Entry, *, is_writable: bool) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    with warnings.catch_warnings():
        if not is_writable:
            # torch knows no read-only tensors and says so; a write would be stopped by the page protection.
            warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        flat = torch.frombuffer(mapping, dtype=dtype, count=entry.numel, offset=entry.offset)
    return flat.view(entry.shape)
