"""The services of a node: their commands and environments."""

import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from tasuki.config.environment import OTLP_HEADERS, wait_policy
from tasuki.config.paths import config_path, fleet_target, node_targets, socket_dir
from tasuki.config.schema import NodeConfig
from tasuki.memory.host import rank_threads

EXIT_REFUSED = 2
"""Exit code of a service that was permanently refused something, such as a port or a place in the fleet."""
EXIT_FLEET_ENDED = 75
"""Exit code of a node whose fleet has ended, so that the job is restarted (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True, slots=True)
class ServiceCommand:
    """Command that starts one service of a node."""

    name: str
    argv: Sequence[str]
    target: str
    """Empty if the service does not listen."""
    environment: dict[str, str] = field(default_factory=dict)
    after: str | None = None
    """A service that must listen before this one is restarted. At the node's start all start at the same time."""
    final_codes: tuple[int, ...] = ()
    """Exit codes after which the service is not restarted and the node stops."""


def node_services(config: NodeConfig) -> list[ServiceCommand]:
    """The three services, plus the fleet service on a node of a fleet.

    Where trainer and engine may share memory, a trainer is restarted once the engine listens.
    """
    # Killed engines leave sockets and files in the temporary folder; the run folder is removed with the node.
    shared = {"PYTHONUNBUFFERED": "1", "TMPDIR": str(socket_dir(config.state_dir))}
    is_cpu = config.device == "cpu"
    threads = {"OMP_NUM_THREADS": str(rank_threads()), "OMP_WAIT_POLICY": wait_policy()} if is_cpu else {}
    launch = ["tasuki.trainer.launch", "--num-ranks", str(config.trainer.num_ranks)]
    launch += ["--preload", "tasuki.trainer.serve"] if is_cpu else []
    targets = node_targets(config)

    def service(name: str, *launcher: str, target: str, **options: Any) -> ServiceCommand:
        module = [*launcher, f"tasuki.{name}", "--config", str(config_path(config.state_dir))]
        environment = shared | options.pop("environment", {})
        return ServiceCommand(name, [sys.executable, "-P", "-m", *module], target, environment, **options)

    services = [
        service("coordinator", target=targets["coordinator"]),
        service("rollout", target=targets["rollout"], environment=threads),
        service(
            "trainer",
            *launch,
            "--",
            "-m",
            target=targets["trainer"],
            environment={"OMP_NUM_THREADS": "1", **threads},
            after="rollout" if config.served_adapter is not None or not is_cpu else None,
        ),
    ]
    if config.fleet is not None:
        target = fleet_target(config) if config.fleet.node_rank == 0 else ""
        services.insert(0, service("fleet", target=target, final_codes=(EXIT_REFUSED, EXIT_FLEET_ENDED)))
    return services


def listens(target: str) -> bool:
    """Whether a server accepts connections at the unix socket of a gRPC target."""
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(target.removeprefix("unix:")) == 0


_SECRET_NAME = re.compile(
    r"""
    # Also without a separator, as in PGPASSWORD.
    (API_?|ACCESS_?|PRIVATE_?|SECRET_?)KEYS? (_|$)
    | (PASSWORD|PASSPHRASE|PASSWD|SECRET|TOKEN)S? (_|$)
    | (^|_) (AUTH|AUTHORIZATION|BEARER|COOKIES?|CREDENTIALS?|CREDS|DSN|HEADERS|JWT|KEYS?|PASS|PAT|PWD|WEBHOOKS?) (_|$)
    | ^(PGPASSFILE|SSHPASS)$
    # Such as DATABASE_URL, MONGODB_URI, AZURE_STORAGE_CONNECTION_STRING.
    | (^|_) (AMQP|BROKER|DATABASE|DB|MONGO(DB)?|MYSQL|POSTGRES(QL)?|REDIS) _UR[IL] (_|$)
    | CONN(ECTION)?_STR(ING)? (_|$)
    """,
    re.IGNORECASE | re.VERBOSE,
)
_SECRET_VALUE = re.compile(
    r"""
    [a-z][a-z0-9+.-]*://[^\s/?\#@]+@   # a URL with a user
    | [?&;\s](access_?key|api_?key|auth|key|passwd|password|pwd|secret|sig|signature|token)=[^\s&;]
    | -----BEGIN\ [A-Z\ ]*PRIVATE\ KEY-----
    """,
    re.IGNORECASE | re.VERBOSE,
)
_KEPT = frozenset({"PWD", OTLP_HEADERS, "OTEL_EXPORTER_OTLP_CLIENT_KEY", "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY"})
"""The shell's folder, and paths of files that exporters of spans open."""


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables whose name and value tell of no secret. No service needs one; trackers and rewards run below `tasuki train`."""
    return {
        name: value
        for name, value in environment.items()
        if _SECRET_VALUE.search(value) is None and (name in _KEPT or _SECRET_NAME.search(name) is None)
    }
