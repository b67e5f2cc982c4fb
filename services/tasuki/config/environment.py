"""Environment variables that a node, its commands and their libraries read; docs/reference/config.md lists them."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from tasuki.wire.errors import InvalidArgument

FAILPOINTS = "TASUKI_FAILPOINTS"
OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
OTLP_HEADERS = "TASUKI_OTLP_HEADERS_FILE"
VARIABLES: Mapping[str, str] = {
    "CUDA_VISIBLE_DEVICES": "GPUs that the node may use, numbered as listed.",
    "OMP_NUM_THREADS": "Torch threads of each rank on a CPU, at most as many as cores; default 1.",
    "OMP_WAIT_POLICY": "How threads of a rank on a CPU wait for each other; default `PASSIVE`, which leaves the cores to others.",
    "NCCL_SOCKET_IFNAME": "NCCL's interface for gradients between nodes; by default its own choice.",
    "CXX": 'Compiler for `trainer.compile = "blocks"` on a CPU; default g++.',
    "GRPC_VERBOSITY": "`INFO` makes services log each failed handshake; default `NONE`.",
    OTLP_ENDPOINT: 'OTLP/HTTP receiver, such as "http://127.0.0.1:4318" (docs/guides/tracing.md). The SDK\'s other variables work.',
    OTLP_HEADERS: "File of HTTP headers for that receiver, one `name: value` per line, which no other user can read.",
    FAILPOINTS: "Faults injected to test recovery, such as `rollout@SYNC=kill` (docs/design/recovery.md).",
    "WANDB_MODE": "`online` lets wandb upload; default `offline`.",
    "MLFLOW_TRACKING_URI": "MLflow's server; default the run's folder.",
    "TRACKIO_DIR": "trackio's folder; default the run's.",
}


def cpu_threads() -> int:
    """Torch threads of a rank on a CPU."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else 1


def wait_policy() -> str:
    """How OpenMP threads of a rank on a CPU wait. Spinning, OpenMP's own default, stops every thread on a core that others use, too."""
    return os.environ.get("OMP_WAIT_POLICY", "PASSIVE")


def failpoint_specs() -> tuple[str, ...] | None:
    """Injected faults; None, without the variable, in a node that is not for tests."""
    given = os.environ.get(FAILPOINTS)
    return None if given is None else tuple(re.findall(r"[^\s,]+", given))


def otlp_endpoint() -> str | None:
    """Receiver of spans, if any. Raises InvalidArgument."""
    endpoint = os.environ.get(OTLP_ENDPOINT) or None
    if endpoint is not None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
            raise InvalidArgument(OTLP_ENDPOINT, 'must be an OTLP/HTTP endpoint, such as "http://127.0.0.1:4318"')
    return endpoint


def otlp_headers_file() -> Path | None:
    """File of headers for the receiver. Raises InvalidArgument."""
    given = os.environ.get(OTLP_HEADERS)
    if given is None:
        return None
    if not Path(given).is_absolute():
        raise InvalidArgument(OTLP_HEADERS, f"is {given}; give an absolute path")
    return Path(given)
