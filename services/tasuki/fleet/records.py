"""Values that describe the fleet's nodes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tasuki.memory.stages import Stage
from tasuki.v1.weights_pb2 import WeightSums


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node's last reported state. `at`: its last completed stage; None if it does not know, as while a service restarts."""

    rank: int
    at: Stage | None
    boot_id: str = ""
    policy_version: int | None = None
    weights_digest: bytes = b""
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums of the weights that a node's rollout received and verified. checksums: of each whole tensor, in name order."""

    policy_version: int
    layout_digest: bytes
    checksums: tuple[int, ...]

    @property
    def digest(self) -> bytes:
        """The digest in the node's state."""
        return hashlib.sha256(self.to_proto().SerializeToString()).digest()

    def to_proto(self) -> WeightSums:
        return WeightSums(policy_version=self.policy_version, layout_digest=self.layout_digest, checksums=self.checksums)

    @classmethod
    def from_proto(cls, sums: WeightSums) -> Sums:
        return cls(sums.policy_version, sums.layout_digest, tuple(sums.checksums))


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """Answer of a node that ran a stage. `sums`: for SYNC only, if the node knows them."""

    view: NodeView
    num_bytes: int = 0
    sums: Sums | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision that all nodes will serve these weights: it can only be completed. number: of the changeover."""

    number: int
    policy_version: int
    weights_digest: bytes
