"""A sync on GPUs against SGLang loading the exported checkpoint from disk: every parameter, bit for bit, after poisoning.

SGLang's models run in TP ranks of one GPU each, without an engine. Needs `make native`, a CUDA GPU and no network.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tasuki.weights.imported_weights import import_weights
from tests.integration.engine_rank import EngineRanks, check_outcomes, engine_ranks, pieces_of
from tests.integration.published import Published
from tests.models import CONFIGS
from tests.received import check_received

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# A single GPU holds both trainer ranks; with more GPUs they are spread, so that every engine rank reads other GPUs.
NUM_TRAINER_RANKS = {1: 2, 2: 2, 4: 4}


@pytest.fixture(scope="module", params=sorted(NUM_TRAINER_RANKS), ids=lambda tp_size: f"tp{tp_size}")
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[EngineRanks, int]]:
    """One TP group, for all models of its size, and that size."""
    num_gpus = torch.cuda.device_count()
    if request.param > num_gpus:
        pytest.skip(f"TP {request.param} needs {request.param} GPUs, here are {num_gpus}")
    with engine_ranks(request.param, device="cuda") as ranks:
        yield ranks, request.param


@pytest.mark.parametrize("kind", list(CONFIGS))
@pytest.mark.parametrize("source_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_sync_equals_loading_the_checkpoint_from_disk(
    ranks: tuple[EngineRanks, int], kind: str, source_dtype: torch.dtype, tmp_path: Path
) -> None:
    group, tp_size = ranks
    devices = [f"cuda:{rank % torch.cuda.device_count()}" for rank in range(NUM_TRAINER_RANKS[tp_size])]
    with ExitStack() as stack:
        published = Published(kind, tmp_path, stack, devices=devices, source_dtype=source_dtype)
        outcomes = group.receive(published.folder, published.message, tp_size=tp_size)
        check_outcomes(outcomes, kind)
        check_received(pieces_of(outcomes), import_weights(published.message, timeout_s=5))
