"""A client whose node ends, or is replaced on the same folder, is told so and does not continue."""

import time
from pathlib import Path

import pytest

from tasuki.client import AsyncClient, Phase
from tasuki.config.lock import NODE_LOCK, StateLock, lock_path
from tasuki.v1 import types_pb2
from tasuki.wire.errors import NodeDown, PeerUnavailable, StaleEpoch
from tests.integration.scripted_node import scripted_node
from tests.integration.test_client import SAMPLE
from tests.limits import limit_s


async def test_a_node_that_was_restarted_is_not_trained_by_the_client_of_the_one_before(tmp_path: Path) -> None:
    async with scripted_node(tmp_path) as node, AsyncClient(state_dir=tmp_path, timeout_s=20) as client:
        node.instance_id = "first"
        await client.generate([[1]])
        node.instance_id, node.phase = "second", types_pb2.PHASE_TRAIN
        with pytest.raises(NodeDown, match="restarted from its initial model"):
            await client.forward_backward([SAMPLE])
        assert node.num_forward_backward == 0


@pytest.mark.parametrize("refusal", [PeerUnavailable("gone"), StaleEpoch("epoch 1 is over", epoch=1, current_epoch=2)])
async def test_a_command_that_the_new_node_gets_first_is_not_repeated_there(refusal: Exception, tmp_path: Path) -> None:
    async with scripted_node(tmp_path) as node, AsyncClient(state_dir=tmp_path, timeout_s=20) as client:
        node.instance_id = "first"
        await client.acquire(Phase.TRAIN)
        node.instance_id = "second"
        node.refusals.append(refusal)
        with pytest.raises(NodeDown, match="restarted"):
            await client.forward_backward([SAMPLE])
        assert node.num_forward_backward == 0


async def test_a_client_waits_for_a_service_while_the_node_is_locked_and_not_a_moment_longer(tmp_path: Path) -> None:
    async with AsyncClient(state_dir=tmp_path, timeout_s=60, recovery_timeout_s=60) as client:
        with StateLock.take(tmp_path, name=NODE_LOCK):
            async with scripted_node(tmp_path) as node:
                node.instance_id, node.lock_path = "first", str(lock_path(tmp_path, name=NODE_LOCK))
                node.failures.append(PeerUnavailable("being restarted"))
                await client.forward_backward([SAMPLE])
                assert node.num_forward_backward == 1
        started = time.monotonic()
        with pytest.raises(NodeDown, match="has ended"):
            await client.forward_backward([SAMPLE])
        assert time.monotonic() - started < limit_s(10)
