"""Access control of a node's ports, and the folders that callers at ports may name."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path

from tasuki.config.table import Schema


class CallerRole(IntEnum):
    """Role of a caller at a port. Each role may call its own methods and those of the roles before it."""

    VIEWER = 1
    TRAINER = 2
    OPERATOR = 3
    PEER = 4

    @classmethod
    def named(cls, name: str) -> CallerRole | None:
        return next((role for role in cls if role.label == name), None)

    @property
    def label(self) -> str:
        """Name of the role in configuration, certificates and errors."""
        return self.name.lower()


class TokensConfig(Schema):
    """Files of bearer tokens for each role, one token per line."""

    viewer: Path | None = None
    """Tokens of callers who may only read. Every file is reloaded when it changes."""
    trainer: Path | None = None
    """Tokens of callers who generate and train."""
    operator: Path | None = None
    """Tokens of callers who also run single stages."""
    peer: Path | None = None
    """Tokens of another coordinator."""

    @property
    def files(self) -> dict[CallerRole, Path]:
        """Configured files, the least role first."""
        given = {role: getattr(self, role.label) for role in CallerRole}
        return {role: path for role, path in given.items() if path is not None}


class SecurityConfig(Schema):
    """TLS and authentication of callers at ports; see docs/security.md."""

    cert: Path | None = None
    """Certificate chain (PEM) of the node's ports. This and the other files are reloaded when they change."""
    key: Path | None = None
    """Unencrypted key of `cert`."""
    client_ca: Path | None = None
    """CA certificates (PEM) that sign callers' certificates. Callers without such a certificate are refused (mTLS)."""
    roles: Path | None = None
    """TOML file of lines `"spiffe://lab/alice" = "operator"`: the role of each SPIFFE id, or of the common name if a certificate has no
    id. By default `spiffe://ANY/tasuki/ROLE` has the role that it names."""
    tokens: TokensConfig = TokensConfig()
    insecure: bool = False
    """Lets every user of the machine call loopback ports, in every role."""


class PathsConfig(Schema):
    """Folders that a caller at a port may name. Callers on a unix socket are the node's own user and may name any."""

    write: tuple[Path, ...] | None = None
    """Folders in which SaveCheckpoint and ExportModel may write and LoadCheckpoint may read. Defaults to `checkpoints` in the state folder
    and the run's `output_dir`."""
    read: tuple[Path, ...] = ()
    """Further folders from which LoadCheckpoint may read."""
