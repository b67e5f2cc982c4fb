"""Fixtures with which kernels run in Triton's interpreter."""

from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Raised by the interpreter's numpy.
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter needs no device, runs no instructions of a GPU, and takes bfloat16 in products for whole numbers."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())

    def multiply(_: str, __: str, factors: list[Any], *, dtype: Any, **___: object) -> Any:
        return factors[0].to(dtype) * factors[1].to(dtype)

    monkeypatch.setattr(tl, "inline_asm_elementwise", multiply)
    dot = InterpreterBuilder.create_dot

    def as_float32(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(builder, as_float32(a), as_float32(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
