"""A second node shared by the session, with everything that the first one leaves out."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import RunningNode, started_node
from tests.integration.port_node import make_certs, make_tokens, mtls, tokens
from tests.ports import free_port

_ROOM = 24 * 10**9
CRITIC_STEPS, CRITIC_LEARNING_RATE = 3, 1e-3
_TABLES = f"""
[trainer.critic]
learning_rate = {CRITIC_LEARNING_RATE}
"""


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and tokens of `roomy`."""
    return make_tokens(make_certs(tmp_path_factory.mktemp("lab")))


@pytest.fixture(scope="session")
def roomy(lab: Path) -> Iterator[RunningNode]:
    """A node with a critic, and room for everything at once, whatever the machine's load: nothing leaves at a changeover.

    Its services listen on ports with TLS and tokens, its metrics, with SGLang's, on a plain one.
    """
    ports = [f"listen=127.0.0.1:{free_port(num=3)}", f"metrics.listen=127.0.0.1:{free_port()}"]
    with started_node(
        tables=_TABLES,
        choices={},
        overrides=[
            *ports,
            *mtls(lab)[:2],
            *tokens(lab),
            "rollout.engine.enable_metrics=true",
            f"memory.host_budget_bytes={_ROOM}",
        ],
    ) as started:
        yield started
