"""Membership of a node: it joins, reports that it is alive or why it ends, and learns of other nodes' ends."""

import asyncio
import socket
from pathlib import Path

import pytest

from tasuki.config.schema import FleetConfig
from tasuki.fleet.__main__ import _why_it_stops
from tasuki.fleet.membership import Membership, this_member
from tasuki.node.exit_report import write_exit_report
from tasuki.node.start import check_place
from tasuki.v1 import fleet_pb2
from tasuki.v1.fleet_pb2_grpc import FleetServiceStub
from tasuki.wire.address import split_host_port
from tasuki.wire.channel import open_channel
from tasuki.wire.errors import FleetEnded, NodeRunning
from tests.integration.test_fleet import TIMEOUT_S, config_of, join, leader_address, leading
from tests.refusal import refused


async def test_a_silent_node_ends_the_fleet_and_the_others_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetConfig, "node_timeout_s", 3.0)
    leader = leader_address()
    configs = [config_of(tmp_path, rank, leader) for rank in range(2)]
    async with leading(configs[0]) as nodes, open_channel(leader) as channel:
        members = [this_member(config, boot_id=f"b{rank}") for rank, config in enumerate(configs)]
        living = asyncio.create_task(Membership(channel, members[0], configs[0].fleet, start_timeout_s=30.0).run())
        await join(channel, members[1])  # and is silent from then on
        with pytest.raises(FleetEnded) as told:
            await asyncio.wait_for(living, 60.0)
        assert told.value.metadata["node_rank"] == "1"
        assert "was silent" in told.value.message
        with pytest.raises(FleetEnded):
            nodes.all()
        assert isinstance(await refused(join(channel, members[1])), FleetEnded)


async def test_a_node_that_is_stopped_ends_the_fleet_at_once_and_says_why(tmp_path: Path) -> None:
    leader = leader_address()
    configs = [config_of(tmp_path, rank, leader) for rank in range(2)]
    async with leading(configs[0]) as nodes, open_channel(leader) as channel:
        members = [this_member(config, boot_id=f"b{rank}") for rank, config in enumerate(configs)]
        await join(channel, members[0])
        membership = Membership(channel, members[1], configs[1].fleet, start_timeout_s=30.0)
        await membership.leave("is not in the fleet yet")
        living = asyncio.create_task(membership.run())
        async with asyncio.timeout(TIMEOUT_S):
            await membership.has_joined.wait()
        await membership._tell(1.0)
        seen = await FleetServiceStub(channel).GetFleet(fleet_pb2.GetFleetRequest(), timeout=TIMEOUT_S)
        assert not seen.members[0].HasField("clock_skew_s")
        assert seen.members[1].HasField("clock_skew_s") and abs(seen.members[1].clock_skew_s) < 1.0
        configs[1].state_dir.mkdir()
        write_exit_report(configs[1].state_dir, reason="asked by SIGTERM", first=None)
        await membership.leave(_why_it_stops(configs[1].state_dir))
        living.cancel()
        assert nodes.error is not None
        assert nodes.error.message == "the fleet has ended: node 1 was stopped by its operator; restart the job"
        assert nodes.error.metadata["node_rank"] == "1"
        told = await refused(join(channel, members[0]))
        assert isinstance(told, FleetEnded) and told.message == nodes.error.message


def test_a_leader_whose_port_is_taken_is_refused_before_it_starts(tmp_path: Path) -> None:
    config = config_of(tmp_path, 0, leader_address())
    assert config.fleet is not None
    check_place(config)
    with socket.create_server(split_host_port(config.fleet.leader)), pytest.raises(NodeRunning) as told:
        check_place(config)
    assert told.value.message.startswith(f"fleet.leader: node 0 cannot serve on {config.fleet.leader}: ")
    assert "MASTER_PORT" in told.value.message


async def test_a_node_joins_again_when_the_leader_was_restarted_and_ends_when_it_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FleetConfig, "node_timeout_s", 2.0)
    leader = leader_address()
    config = config_of(tmp_path, 0, leader)
    assert isinstance(config.fleet, FleetConfig)
    async with open_channel(leader) as channel:
        membership = Membership(channel, this_member(config, boot_id="b0"), config.fleet, start_timeout_s=30.0)
        living = asyncio.create_task(membership.run())
        for _ in range(2):
            async with leading(config) as nodes:
                async with asyncio.timeout(60.0):
                    while not nodes.joined:
                        await asyncio.sleep(0.05)
        with pytest.raises(
            FleetEnded, match="the leader at .* was silent .*; nothing listens there any more: it was stopped or has ended"
        ):
            await asyncio.wait_for(living, 60.0)
