"""State of a fleet's trainers, merged into one."""

from __future__ import annotations

from tasuki.fleet.states import merged_trainer_state
from tasuki.v1.trainer_pb2 import GetTrainerStateResponse


def test_the_slowest_node_counts_and_transports_are_named_by_node_where_they_differ() -> None:
    fast, slow, silent = (
        GetTrainerStateResponse(nodes_rate=5e9, nodes_transport="NET/IB"),
        GetTrainerStateResponse(nodes_rate=1e9, nodes_transport="NET/Socket"),
        GetTrainerStateResponse(),
    )
    alike = merged_trainer_state([fast, fast])
    assert (alike.nodes_rate, alike.nodes_transport) == (5e9, "NET/IB")
    unlike = merged_trainer_state([fast, slow])
    assert (unlike.nodes_rate, unlike.nodes_transport) == (1e9, "NET/IB on node 0; NET/Socket on node 1")
    unknown = merged_trainer_state([fast, silent])
    assert not unknown.HasField("nodes_rate")
    assert unknown.nodes_transport == "NET/IB on node 0; unknown on node 1"
