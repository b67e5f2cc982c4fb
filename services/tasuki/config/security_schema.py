"""Who may call a node's ports, and which folders such a caller may name."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

from tasuki.config.table import Schema


class CallerRole(IntEnum):
    """What a caller at a port may do: all that the roles before his may, and his own methods."""

    VIEWER = 1
    TRAINER = 2
    OPERATOR = 3
    PEER = 4

    @classmethod
    def named(cls, name: str) -> CallerRole | None:
        return next((role for role in cls if role.label == name), None)

    @property
    def label(self) -> str:
        """As configuration, certificates and errors name it."""
        return self.name.lower()


class TokensConfig(Schema):
    """Files of bearer tokens, one token a line, each for one role."""

    viewer: Path | None = None
    """Tokens of callers who may only look. Every file is read again when it changes."""
    trainer: Path | None = None
    """Tokens of callers who generate and train."""
    operator: Path | None = None
    """Tokens of callers who run single stages, too."""
    peer: Path | None = None
    """Tokens of another coordinator."""

    @property
    def files(self) -> dict[CallerRole, Path]:
        """Those that are given, the least role first."""
        given = {role: getattr(self, role.label) for role in CallerRole}
        return {role: path for role, path in given.items() if path is not None}


class SecurityConfig(Schema):
    """TLS, and who callers at ports are; see docs/security.md."""

    cert: Path | None = None
    """Certificate chain (PEM) of the node's ports. This and the other files are read again when they change."""
    key: Path | None = None
    """Key of `cert`, not encrypted."""
    client_ca: Path | None = None
    """Authorities (PEM) that sign callers' certificates. A caller without such a certificate is refused (mTLS)."""
    roles: Path | None = None
    """TOML file of lines `"spiffe://lab/alice" = "operator"`: the role of each SPIFFE id, or common name where a certificate has none. By
    default the id `spiffe://ANY/tasuki/ROLE` has the role in its name."""
    tokens: TokensConfig = TokensConfig()
    insecure: bool = False
    """Lets every user of the machine call ports on loopback, in every role."""


class PathsConfig(Schema):
    """Folders that a caller at a port may name. A caller on a unix socket is the node's own user, and may name any."""

    write: tuple[Path, ...] | None = None
    """Folders in which SaveCheckpoint and ExportModel write, and LoadCheckpoint reads. By default `checkpoints` in the state folder, and
    the run's `output_dir`."""
    read: tuple[Path, ...] = ()
    """Further folders from which LoadCheckpoint reads."""
