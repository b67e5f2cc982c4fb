"""Host memory for copies to and from a GPU that overlap its computation."""

import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tasuki.memory.host import host_memory
from tasuki.trainer.replicas import mesh_device
from tasuki.wire.errors import InvalidArgument


class Copy(NamedTuple):
    """A copy that was started."""

    tensor: Tensor
    """The tensor on the device."""
    is_done: torch.cuda.Event | None
    """None if the copy is already complete, on a CPU."""

    def wait(self) -> None:
        """Makes subsequent computation wait, not the host."""
        if self.is_done is not None:
            torch.cuda.current_stream().wait_event(self.is_done)


def copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Stream for copies in one direction; None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def start_copy(target: Tensor, source: Tensor, *, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Starts a copy after the computation queued so far, overlapping what follows."""
    if stream is None:
        target.copy_(source)
        return None
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    is_done = torch.cuda.Event()
    is_done.record(stream)
    return is_done


def take_buffers(mesh: DeviceMesh, sizes: Sequence[int], *, setting: str, advice: str) -> list[Tensor]:
    """Allocates uint8 buffers of these sizes, pinned on a GPU, until `release_buffers`. Collective, with similar sizes.

    setting: what needs them, as "trainer.key = value". Raises InvalidArgument on every rank, ending with `advice`, if the host has less
    memory than all ranks need, or if CUDA cannot pin it.
    """
    needed = -_least(-sum(sizes), mesh) * mesh.size()
    # No rank allocates before all have checked.
    available = _least(host_memory().available_bytes, mesh)
    problem = f"needs {needed} bytes of host memory for {mesh.size()} ranks"
    key, _, value = setting.partition(" = ")
    if needed > available:
        raise InvalidArgument(key, f"{value} {problem}, but {available} are available; {advice}", needed_bytes=needed)
    if mesh.device_type == "cpu":
        return [torch.empty(size, dtype=torch.uint8) for size in sizes]
    # Torch's own pinned allocations are rounded up to a power of two.
    buffers = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) for size in sizes]
    is_pinned = pin(buffers)
    if not _least(int(is_pinned), mesh):
        if is_pinned:
            release_buffers(buffers, device=mesh_device(mesh))
        raise InvalidArgument(key, f"{value} {problem}, which CUDA cannot pin; {advice}", needed_bytes=needed)
    return buffers


def pin(buffers: Sequence[Tensor]) -> bool:
    """Pins all buffers for CUDA, or none. Returns whether it could."""
    cuda = cast(Any, torch.cuda.cudart())
    for number, buffer in enumerate(buffers):
        if int(cuda.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)):
            for pinned in buffers[:number]:
                cuda.cudaHostUnregister(pinned.data_ptr())
            return False
    return True


def release_buffers(buffers: Sequence[Tensor], *, device: torch.device) -> None:
    """Waits for all copies. The memory is freed once the buffers are no longer referenced."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        cuda = cast(Any, torch.cuda.cudart())
        for buffer in buffers:
            cuda.cudaHostUnregister(buffer.data_ptr())


def _least(number: int, mesh: DeviceMesh) -> int:
    """Minimum over all ranks."""
    least = torch.tensor(number, dtype=torch.int64, device=mesh_device(mesh))
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=mesh.get_group("dp"))
    return int(least)
