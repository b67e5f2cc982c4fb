"""Float32 logits from bfloat16 weights on a GPU: the product, in a CUDA graph."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_the_product_is_not_rounded_also_in_a_graph() -> None:
    from tasuki.rollout.sglang.models import float32_product  # imports SGLang

    torch.manual_seed(0)
    hidden = torch.randn(8, 1024, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(32_000, 1024, device="cuda", dtype=torch.bfloat16)
    exact = hidden.double() @ weight.double().T
    float32_product(hidden, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = float32_product(hidden, weight)
    graph.replay()
    assert logits.dtype == torch.float32
    rounded = (hidden @ weight.T).double()
    assert (logits.double() - exact).abs().max() < 1e-3 < (rounded - exact).abs().max()
