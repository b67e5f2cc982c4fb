"""SGLang's own metrics of spawned ranks, as used on GPUs."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import started_node
from tests.engine_metrics import page, tokens_counted
from tests.gpu.test_node_gpu import GPU
from tests.integration.node_process import wait_for
from tests.ports import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(600),
]


def test_sglangs_metrics_follow_what_is_generated() -> None:
    settings = ["trainer.num_ranks=1", *GPU, f"metrics.listen=127.0.0.1:{free_port()}", "rollout.engine.enable_metrics=true"]
    with started_node(overrides=settings, residency="") as node:
        before, made = tokens_counted(node, num_samples=3)
        wait_for(lambda: page(node).tokens()[:2] == [old + made for old in before[:2]])
        # Overlapped scheduling may compute one token more per sample.
        assert page(node).tokens()[2] >= before[2] + made - 3
