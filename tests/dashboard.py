"""A dashboard served by this process, and requests to it."""

import http.client
import json
import ssl
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasuki.config.schema import NodeConfig
from tasuki.dashboard.server import DashboardServer, make_server
from tests.ports import free_port

RECORDED = Path(__file__).parent / "recorded_run"


@contextmanager
def served(
    folder: Path | None, *, config: NodeConfig | None = None, host: str = "127.0.0.1", others: Sequence[Path] = ()
) -> Iterator[DashboardServer]:
    """Serves the dashboard of a run's folder, or of a node, while the block runs."""
    server = make_server(folder, config=config, others=others, listen=f"{host}:{free_port()}")
    server.feed.start()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.feed.close()
        server.shutdown()
        server.server_close()
        thread.join()


def token_of(server: DashboardServer) -> str:
    return server.url.partition("#token=")[2]


def get(
    server: DashboardServer, path: str, *, token: str | None = None, tls: ssl.SSLContext | None = None, host: str | None = None
) -> tuple[int, http.client.HTTPMessage, bytes]:
    port = server.server_address[1]
    connection = (
        http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        if tls is None
        else http.client.HTTPSConnection("localhost", port, timeout=10, context=tls)
    )
    headers = {} if host is None else {"Host": host}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.headers, answer.read()


def ask(server: DashboardServer, path: str, **given: Any) -> Any:
    """Returns the JSON of an answer, asked with the dashboard's token."""
    status, _, body = get(server, path, token=token_of(server), **given)
    assert status == 200, body
    return json.loads(body)
