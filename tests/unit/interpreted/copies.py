"""The kernel that copies and sums against plain torch, run by Triton's interpreter on a CPU."""

import pytest
import torch

from tasuki.weights.copies import DeviceCopies, HostCopies, ViewCopy
from tasuki.weights.plan import whole

CPU = torch.device("cpu")
SHAPES = [(40, 64), (3, 2000), (5,), (9, 77)]


@pytest.mark.parametrize("counts_held", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_summing_kernel_is_plain_torch(dtypes: tuple[torch.dtype, torch.dtype], counts_held: bool) -> None:
    torch.manual_seed(0)
    sources = [torch.randn(shape).bfloat16().to(dtypes[0]) for shape in SHAPES]
    sums = []
    for is_on_device in (True, False):
        held = [torch.zeros(shape, dtype=dtypes[1]) for shape in SHAPES]
        views = [
            ViewCopy(
                held=destination,
                source=source,
                where=whole(destination.shape, offset=1000 * slot),
                counted=dtypes[counts_held],
                slot=slot,
            )
            for slot, (destination, source) in enumerate(zip(held, sources, strict=True))
        ]
        num_sums = len(SHAPES)
        copies = DeviceCopies(views, num_sums=num_sums, device=CPU) if is_on_device else HostCopies(views, num_sums=num_sums)
        copies.start()
        sums.append(copies.sums().tolist())
        for destination, source in zip(held, sources, strict=True):
            assert torch.equal(destination, source.bfloat16())
    assert sums[0] == sums[1]
