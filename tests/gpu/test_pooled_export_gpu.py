"""Published weights in the chunks of pools of real GPUs, read again after each time they left: no chunk is imported twice.

Needs `make native`, a CUDA GPU (two for all of it) and no network.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from tasuki.memory.pool import PoolKeeper
from tests.integration.pooled_rank import PooledRank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
GIB = 1 << 30
NUM_ROWS, NUM_CHUNKS = 256 * 1024, 4
"""1 GiB of float32."""


@pytest.mark.parametrize(("gpu", "num_imported"), [(0, 0), (1, NUM_CHUNKS)], ids=["the same GPU", "another GPU"])
def test_each_chunk_is_imported_at_most_once(tmp_path: Path, gpu: int, num_imported: int) -> None:
    if torch.cuda.device_count() <= gpu:
        pytest.skip("needs two GPUs")
    with ExitStack() as stack:
        pools = [PoolKeeper(4 * GIB, device=f"cuda:{index}") for index in range(gpu + 1)]
        trainer, reader = (PooledRank(tmp_path, NUM_ROWS, device=pool.device, fds=pool.fds) for pool in (pools[0], pools[gpu]))
        for one in (trainer, reader, *pools):
            stack.callback(one.close)
        for version in range(4):
            assert reader.read(trainer.publish(version)) == (version + 1, num_imported)
            assert pools[0].usage().num_read == 0, "a reader leaves when it has read"
            trainer.come_back()
