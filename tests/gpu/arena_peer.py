"""A process that maps the chunks of an arena and answers on a pipe: `python arena_peer.py <device> offset:bytes:fd...`."""

import sys

import torch

from tasuki.memory.shared_chunks import Import, SharedChunk
from tasuki.wire.errors import TasukiError


class At:
    """Device memory at an address, in a form for torch.as_tensor."""

    def __init__(self, address, num_bytes):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def peer(device, *described):
    chunks = [SharedChunk(*map(int, one.split(":"))) for one in described]
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    imported = Import(chunks, device=device)
    span = chunks[-1].offset + chunks[-1].num_bytes
    for line in sys.stdin:
        verb, *numbers = line.split()
        try:
            tensor = torch.as_tensor(At(imported.base, span), device=device) if verb in ("read", "write") else None
            if verb == "read":
                answer = int(tensor[int(numbers[0]) : int(numbers[0]) + 1].clone().cpu())
            elif verb == "write":
                tensor[int(numbers[0]) : int(numbers[0]) + 1].copy_(torch.tensor([int(numbers[1])], dtype=torch.uint8))
                torch.cuda.synchronize()
                answer = "done"
            else:
                getattr(imported, verb)()
                answer = "done"
        except (RuntimeError, TasukiError) as error:
            answer = f"refused {type(error).__name__} {str(error).splitlines()[0]}"
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    peer(*sys.argv[1:])
