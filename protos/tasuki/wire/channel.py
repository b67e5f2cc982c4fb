"""Channels and their settings: message limits, keepalive, retry of reads. Client and server share them."""

import json
from collections.abc import Sequence

import grpc
import grpc.aio

from tasuki.wire.address import is_beyond_loopback, split_host_port
from tasuki.wire.credentials import Credentials, tls_files
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.labelled_channel import LabelledChannel
from tasuki.wire.reloading_channel import ReloadingChannel

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Streams of samples are split into messages of at most this size.
MAX_CHUNK_BYTES = 1024 * 1024
# The server closes connections that ping too often ("too_many_pings"), so CLIENT must stay above SERVER_MIN.
KEEPALIVE_CLIENT_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
KEEPALIVE_SERVER_MIN_MS = 10_000

_LIMITS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES), ("grpc.max_send_message_length", MAX_MESSAGE_BYTES)]

# For reads only. A mutating call is repeated by its caller with the same request_id, never by the channel.
_READS = {
    "TrainerService": ["GetTrainerState"],
    "RolloutService": ["GetRolloutState"],
    "CoordinatorService": ["GetState", "ListChangeovers"],
    "FleetService": ["GetFleet"],
    "MemoryService": ["GetUsage"],
    "MetricsService": ["GetMetrics"],
}
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": f"tasuki.v1.{service}", "method": method}
                for service, methods in _READS.items()
                for method in methods
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

CLIENT_OPTIONS: list[tuple[str, int | str]] = [
    *_LIMITS,
    ("grpc.keepalive_time_ms", KEEPALIVE_CLIENT_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # Reconnect quickly: on one machine a refused connection is cheap. The default backs off for up to 120 s.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    # Ignore proxies from the environment: these are connections between processes of one node.
    ("grpc.enable_http_proxy", 0),
]

SERVER_OPTIONS: list[tuple[str, int | str]] = [
    *_LIMITS,
    # Otherwise two servers may silently share one address.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_SERVER_MIN_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.max_concurrent_streams", 1000),
    ("grpc.max_metadata_size", 64 * 1024),
]


PORT_OPTIONS: list[tuple[str, int | str]] = [
    *SERVER_OPTIONS,
    # A handshake takes two round trips; slower peers only tie up a connection.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # Certificates are checked only when a connection opens, so connections have a maximum age. Running calls are allowed to finish.
    ("grpc.max_connection_age_ms", 600_000),
    ("grpc.max_allowed_incoming_connections", 1000),
]
"""For a server on a TCP port, which strangers may connect to."""
MAX_PORT_CALLS = 2000
"""Calls that a port serves at once, more than one connection may have. Each may hold an unfinished message of MAX_MESSAGE_BYTES."""
_SCHEMES = ("unix", "unix-abstract", "dns", "ipv4", "ipv6", "vsock")


def open_channel(
    target: str, *, credentials: Credentials | None = None, metadata: Sequence[tuple[str, str | bytes]] = ()
) -> grpc.aio.Channel:
    """Opens an asyncio channel to `target`, e.g. "unix:/run/tasuki/trainer.sock" or "node-a:50051". Unix sockets need no credentials.

    metadata: added to every call.

    Raises InvalidArgument for a target that is no address, a plaintext connection beyond loopback, and unusable files in `credentials`.
    """
    channel = _open(target, credentials)
    return LabelledChannel(channel, metadata) if metadata else channel


def _open(target: str, credentials: Credentials | None) -> grpc.aio.Channel:
    _check_target(target)
    if credentials is None or target.startswith("unix:"):
        _refuse_plaintext(target)
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
    if credentials.ca is None:
        _refuse_plaintext(target)
    return ReloadingChannel(target, credentials, options=CLIENT_OPTIONS)


def open_blocking_channel(target: str, *, credentials: Credentials | None = None) -> grpc.Channel:
    """Opens a blocking channel for a few calls. Close it, or use it in a `with` block.

    Certificates are read once; a token is passed with each call (`credentials.authorization`). Raises as `open_channel`.
    """
    _check_target(target)
    if credentials is None or credentials.ca is None or target.startswith("unix:"):
        _refuse_plaintext(target)
        return grpc.insecure_channel(target, options=CLIENT_OPTIONS)
    tls = tls_files(credentials).read()
    secured = grpc.ssl_channel_credentials(tls.ca, private_key=tls.key, certificate_chain=tls.cert)
    return grpc.secure_channel(target, secured, options=CLIENT_OPTIONS)


def _check_target(target: str) -> None:
    """gRPC would take a name without a port, and call port 443."""
    if target.partition(":")[0] in _SCHEMES:
        return
    try:
        split_host_port(target)
    except ValueError as error:
        raise InvalidArgument("target", f"{target!r} {error}, or unix:PATH of a socket") from error


def _refuse_plaintext(target: str) -> None:
    if is_beyond_loopback(target):
        raise InvalidArgument(
            "credentials", f"{target} is not loopback: give credentials with `ca`, so that calls to it use TLS"
        )
