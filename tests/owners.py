"""Files of other users."""

import os
from pathlib import Path

import pytest

_OTHER = 12345


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `path` another user's; without the right to, makes this process another user's."""
    if os.geteuid() == 0:
        os.lchown(path, _OTHER, _OTHER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: _OTHER)
