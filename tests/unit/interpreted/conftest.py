"""What every kernel needs to run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Raised by the interpreter's numpy.
        item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter needs no device, and runs no instructions of a GPU."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())

    def multiply(_: str, __: str, factors: list[Any], *, dtype: Any, **___: object) -> Any:
        return factors[0].to(dtype) * factors[1].to(dtype)

    monkeypatch.setattr(tl, "inline_asm_elementwise", multiply)
