"""Notices when another node's trainer restarts, after which all trainers must meet again."""

import asyncio
import logging

import grpc.aio

from tasuki.config.schema import NodeConfig
from tasuki.rpc.port import peer_credentials
from tasuki.v1 import rank_store_pb2 as pb
from tasuki.v1.rank_store_pb2_grpc import RankStoreServiceStub
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import DeadlineExceeded, StaleEpoch, from_rpc_error

_log = logging.getLogger("tasuki.trainer")
END_KEY = "end"
"""A key that is never set. Who waits for it hears when all trainers have to start again, also after a restart of the leader."""
_WAIT_S = 60.0
_MARGIN_S = 5.0
_PAUSE_S = 1.0


async def until_another_starts(config: NodeConfig, store: str) -> None:
    """Returns once another node's trainer waits for this one to restart.

    Between optimizer steps no collective would reveal it. store: joined by this start.
    """
    assert config.fleet is not None
    request = pb.WaitForKeysRequest(store=store, keys=[END_KEY], timeout_s=_WAIT_S)
    async with open_channel(config.fleet.leader, credentials=peer_credentials(config.security)) as channel:
        stub = RankStoreServiceStub(channel)
        while True:
            try:
                await stub.WaitForKeys(request, timeout=_WAIT_S + _MARGIN_S)
            except grpc.aio.AioRpcError as error:
                known = from_rpc_error(error)
                if isinstance(known, StaleEpoch):
                    _log.warning("event=start_again cause=%a", known.message)
                    return
                if not isinstance(known, DeadlineExceeded):  # the leader may restart
                    await asyncio.sleep(_PAUSE_S)
