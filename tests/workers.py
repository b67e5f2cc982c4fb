"""How pytest-xdist's workers share the tests: a file goes to one worker, as do files that share a running service."""

from __future__ import annotations

from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Begun before all other files of these folders, the longest first: what takes long, and what shares a node, an engine or a trainer.
_FIRST = {
    "node": [
        "e2e/test_arithmetic",
        "e2e/test_node",
        "e2e/test_documents",
        "e2e/test_flat",
        "e2e/test_recovery",
        "e2e/test_resume",
        "e2e/test_sockets",
        "integration/test_grpcurl",
    ],
    "demo": ["e2e/test_demo"],
    "roomy": ["e2e/test_ppo", "e2e/test_residency", "e2e/test_secrets"],
    "pool": ["e2e/test_pool"],
    "ranks": [
        "integration/test_trainer_exactness",
        "integration/test_critic_exactness",
        "integration/test_loss_cuts",
        "integration/test_trainer_memory",
        "integration/test_sync_broken",
        "integration/test_weight_exchange",
        "integration/test_release",
        "integration/test_torn_sync",
    ],
    "engine": [
        "integration/test_rollout",
        "integration/test_rollout_generate",
        "integration/test_rollout_memory",
    ],
    "engines": ["integration/test_rollout_process", "integration/test_engine_sockets"],
    "parts": ["integration/test_engine_parts"],
    "trainers": ["integration/test_trainer_lifetime"],
    "fleet": ["integration/test_fleet_trainer"],
    "trainer": ["integration/test_trainer", "integration/test_trainer_requests", "integration/test_trainer_weights"],
    "supervisor": ["integration/test_node_process"],
}
_GROUPS = {f"tests/{file}.py": group for group, files in _FIRST.items() for file in files}


class FilesOverWorkers(LoadScopeScheduling):
    """Hands out one group after another: unit tests and contracts, the groups above, all other files, those of a GPU together."""

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        first = min(self.workqueue, key=_turn)
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def group_of(nodeid: str) -> str:
    """Name of the tests that one worker runs one after another, with the services that they share."""
    file = nodeid.partition("::")[0]
    return "gpu" if file.startswith("tests/gpu/") else _GROUPS.get(file, file)


def _turn(scope: str) -> int:
    """When a group's turn comes; those of equal turn keep their order."""
    if scope.startswith(("tests/unit/", "tests/contract/")):
        return 0
    groups = list(_FIRST)
    return 1 + groups.index(scope) if scope in groups else 1 + len(groups)
