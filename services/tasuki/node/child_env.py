"""The environment that a node's processes inherit."""

from __future__ import annotations

import re
from collections.abc import Mapping

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
_KEPT = frozenset({"PWD", "OTEL_EXPORTER_OTLP_CLIENT_KEY", "OTEL_EXPORTER_OTLP_TRACES_CLIENT_KEY"})
"""The shell's folder, and paths of files that exporters of spans open."""


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables whose name and value tell of no secret. No service needs one; trackers and rewards run below `tasuki train`."""
    return {name: value for name, value in environment.items() if not _tells_of_secret(name, value)}


def _tells_of_secret(name: str, value: str) -> bool:
    if _SECRET_VALUE.search(value) is not None:
        return True
    return name not in _KEPT and _SECRET_NAME.search(name) is not None
