"""Distribution of tests over pytest-xdist workers: a file goes to one worker, as do files that share a running service.

A test with processes spends about a third of its time waiting for them. The last worker meanwhile runs the unit tests, then helps the
others.
"""

from typing import Any

from xdist.scheduler import LoadScopeScheduling

# Begun before all other files of these folders, longest first: slow files, and those that share a node, an engine, a trainer, or the
# server that forks ranks.
_FIRST = {
    "ranks": [
        "integration/test_trainer_exactness",
        "integration/test_critic_exactness",
        "integration/test_trainer_memory",
        "integration/test_sync_broken",
        "integration/test_weight_exchange",
        "integration/test_release",
        "integration/test_torn_sync",
        "integration/test_trainer_ranks",
        "integration/test_rank_front",
        "integration/test_atomic_folder",
        "integration/test_trainer",
        "integration/test_trainer_client",
        "integration/test_trainer_requests",
        "integration/test_trainer_weights",
    ],
    "node": [
        "e2e/test_arithmetic",
        "e2e/test_node",
        "e2e/test_documents",
        "e2e/test_episodes",
        "e2e/test_flat",
        "e2e/test_gateway",
        "e2e/test_recovery",
        "e2e/test_resume",
        "e2e/test_sockets",
        "integration/test_grpcurl",
    ],
    "demo": ["e2e/test_demo"],
    "roomy": ["e2e/test_engine_metrics", "e2e/test_ppo", "e2e/test_residency", "e2e/test_secrets"],
    "starting points": ["e2e/test_starting_points"],
    "supervisor": ["integration/test_node_process"],
    "engine": [
        "integration/test_rollout",
        "integration/test_rollout_generate",
        "integration/test_rollout_great_calls",
        "integration/test_rollout_memory",
    ],
    "engines": ["integration/test_rollout_process"],
    "parts": ["integration/test_engine_parts"],
    "trainers": ["integration/test_trainer_lifetime"],
    "fleet": ["integration/test_fleet_trainer"],
}
_GROUPS = {f"tests/{file}.py": group for group, files in _FIRST.items() for file in files}


class FilesOverWorkers(LoadScopeScheduling):
    """Hands out one group at a time: those above, then all other files; GPU tests form one group. Unit and contract tests: see `turn`."""

    def __init__(self, config: Any, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def remove_node(self, node: Any) -> str | None:
        """Reassigns the unfinished groups of a crashed worker. xdist would also reassign finished files, and wait forever."""
        groups = self.assigned_work[node]
        for group in [group for group, tests in groups.items() if all(tests.values())]:
            del groups[group]
        return super().remove_node(node)

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    def _assign_work_unit(self, node: Any) -> None:
        is_last = node.gateway.id == f"gw{self.numnodes - 1}"
        first = min(self.workqueue, key=lambda group: turn(group, units_first=is_last))
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def group_of(nodeid: str) -> str:
    """Returns the group of a test: tests that one worker runs in sequence, with shared services."""
    file = nodeid.partition("::")[0]
    return "gpu" if file.startswith("tests/gpu/") else _GROUPS.get(file, file)


def turn(group: str, *, units_first: bool) -> int:
    """Returns the sort key of a group; equal keys keep their order."""
    groups = list(_FIRST)
    if group.startswith(("tests/unit/", "tests/contract/")):
        return -1 if units_first else len(groups) + 1
    return groups.index(group) if group in groups else len(groups)
