"""Bytes that cross nodes in an optimizer step, by layout, and the time a network needs for them. Pure.

Source: over R nodes, a ring all-reduce sends 2 (R - 1) / R of the bytes through each node, an all-gather or reduce-scatter (R - 1) / R.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tasuki.planner.node import Node
from tasuki.planner.trainer_bytes import gradient_bytes
from tasuki.wire.errors import InvalidArgument

_FLOAT32_BYTES, _HALF_BYTES = 4, 2
_GBIT = 10**9 / 8


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic in each direction through one node's network cards."""

    layout: str
    num_bytes: int
    per: str
    """"step" or "micro-batch"."""
    is_available: bool
    """Whether a fleet supports it. The first is its current configuration; the others are for comparison."""

    def seconds(self, network_gbit: float) -> float:
        """Seconds at `network_gbit` 10^9 bits/s over all cards of a node; an estimate without latency and overlap."""
        return self.num_bytes / (network_gbit * _GBIT)


def node_traffic(node: Node, *, num_nodes: int) -> Sequence[Traffic]:
    """Traffic of a fleet of `num_nodes` such nodes; empty for one. Raises InvalidArgument for less than one."""
    if num_nodes < 1:
        raise InvalidArgument("nodes", f"{num_nodes} must be at least 1")
    if num_nodes == 1:
        return ()
    gradients = gradient_bytes(node) * node.num_ranks
    crossing = (num_nodes - 1) / num_nodes
    gathered = node.model.num_parameters * node.compute_bytes
    reduced = gradients * _FLOAT32_BYTES // node.param_bytes
    rows = [Traffic("HSDP", round(2 * crossing * gradients), "step", True)]
    if node.lora is None and node.param_bytes > _HALF_BYTES:
        halved = round(2 * crossing * gradients * _HALF_BYTES / node.param_bytes)
        rows.append(Traffic('HSDP with trainer.param_dtype = "bfloat16"', halved, "step", True))
    rows.append(Traffic("FSDP over all nodes", round(crossing * (2 * gathered + reduced)), "micro-batch", False))
    return rows


def check_rate(network_gbit: float | None, *, num_nodes: int) -> None:
    """Raises InvalidArgument for an invalid rate, and for any rate if there is only one node."""
    if network_gbit is not None and num_nodes == 1:
        raise InvalidArgument("network-gbit", "is the rate between nodes, but this plan has one node: also give --nodes N")
    if network_gbit is not None and not (math.isfinite(network_gbit) and network_gbit > 0):
        raise InvalidArgument("network-gbit", f"must be a rate above 0 in 10^9 bits a second, not {network_gbit:g}")
