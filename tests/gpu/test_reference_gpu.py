"""A KL reference in pinned host memory, and torch's cache returned before a publication, on a GPU.

Needs `make native` and a CUDA GPU.
"""

from pathlib import Path
from typing import cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tasuki.trainer.data.micro_batch import token_batch
from tasuki.trainer.learner import Learner
from tasuki.trainer.service.requests import decode_samples
from tasuki.trainer.wire import Role
from tasuki.wire.stages import MemoryTag
from tests.integration.learning import fsdp, start_learner
from tests.integration.plain_critic import value_samples

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def weights_bytes(learner: Learner) -> int:
    return fsdp(learner).memory._allocator.arena(MemoryTag.WEIGHTS).usage().used_bytes


def test_a_reference_on_the_host_is_pinned_and_scores_the_same_bits(mesh: DeviceMesh, model: Path) -> None:
    samples = decode_samples(value_samples(32))
    scores: list[torch.Tensor] = []
    for on_host in (False, True):
        learner = start_learner(model, mesh=mesh, compute_dtype="bfloat16", reference_on_host=on_host)
        batch = token_batch(samples, device=learner.backend.device)
        before = weights_bytes(learner)
        scores.append(torch.cat(learner.score(Role.REFERENCE, [batch, batch])))
        reference = fsdp(learner)._reference
        assert reference is not None
        shards = [cast(DTensor, param).to_local() for param in reference.parameters()]
        assert {(shard.device.type, shard.is_pinned()) for shard in shards} == {("cpu", True) if on_host else ("cuda", False)}
        grown = weights_bytes(learner) - before
        assert grown == 0 if on_host else grown >= sum(shard.nbytes for shard in shards)
        learner.backend.close()
    assert torch.equal(*scores)
