"""The environment that a node's processes inherit."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECRET = re.compile(
    r"(^|_)(API_?KEY|ACCESS_KEY(_ID)?|CREDENTIALS?|PASSPHRASE|PASSWD|PASSWORD|PRIVATE_KEY|SECRETS?|TOKENS?)(_|$)", re.IGNORECASE
)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables whose names do not tell of a secret: no service needs one, while trackers and rewards run below `tasuki train`."""
    return {name: value for name, value in environment.items() if _SECRET.search(name) is None}
