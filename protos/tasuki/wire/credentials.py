"""What a caller shows at a port: a certificate, or a token. Files, so that no secret is in an argument or an environment."""

from __future__ import annotations

import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from tasuki.wire.errors import InvalidArgument

MIN_TOKEN_CHARS = 32


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a caller shows at a node's ports, and whom it trusts there. Files that change are read again between two calls.

    ca: PEM of the authority that has signed the node's certificate. Without it the connection is plaintext, which only loopback allows.
    cert, key: PEM of the caller's own certificate, for a node with `security.client_ca`.
    token_file: the first line is the caller's token, for a node with `security.tokens`.

    Raises InvalidArgument for a combination that no port takes. The files are looked at when a channel is opened.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    token_file: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) is not (self.key is None):
            raise InvalidArgument("credentials", "cert and key go together")
        if self.cert is not None and self.ca is None:
            raise InvalidArgument("credentials", "cert needs ca: the authority that has signed the node's certificate")
        if self.ca is None and self.token_file is None:
            raise InvalidArgument("credentials", "give ca, or a token_file for a port on loopback")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end of a connection. Their names are the keys that errors name."""

    cert: tuple[str, Path] | None = None
    key: tuple[str, Path] | None = None
    ca: tuple[str, Path] | None = None

    @property
    def paths(self) -> list[Path]:
        return [path for _, path in filter(None, (self.cert, self.key, self.ca))]

    def read(self) -> TlsMaterial:
        """Raises InvalidArgument naming the key of a file that is missing, no PEM, no pair, or readable by every user."""
        if self.key is not None:
            check_secret(*self.key)
        if self.cert is not None and self.key is not None:
            _check_pair(self.cert, self.key)
        cert, key, ca = (None if file is None else read_file(*file) for file in (self.cert, self.key, self.ca))
        if ca is not None and self.ca is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii"))
            except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
                raise InvalidArgument(self.ca[0], f"{self.ca[1]} holds no certificates in PEM: {error}") from error
        return TlsMaterial(cert=cert, key=key, ca=ca)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """What TlsFiles held at one moment, PEM."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


def tls_files(credentials: Credentials) -> TlsFiles:
    def named(field: str) -> tuple[str, Path] | None:
        path = getattr(credentials, field)
        return None if path is None else (f"credentials.{field}", Path(path))

    return TlsFiles(cert=named("cert"), key=named("key"), ca=named("ca"))


def read_tokens(field: str, path: Path) -> tuple[str, ...]:
    """The tokens in a file, one a line; blank lines and those with a # in front are none.

    Raises InvalidArgument naming `field`, never the token, for a file without one, with a short one, or that every user may read.
    """
    check_secret(field, path)
    try:
        lines = [line.strip() for line in read_file(field, path).decode("ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, f"{path} is not ASCII") from error
    tokens = tuple(line for line in lines if line and not line.startswith("#"))
    if not tokens or any(len(token) < MIN_TOKEN_CHARS or not token.isprintable() or " " in token for token in tokens):
        advice = f"(umask 077; openssl rand -hex {MIN_TOKEN_CHARS} > {path})"
        raise InvalidArgument(
            field, f"{path} must hold tokens of {MIN_TOKEN_CHARS} characters or more, one a line; make one: {advice}"
        )
    return tokens


def authorization(credentials: Credentials | None) -> tuple[tuple[str, str], ...]:
    """Metadata of a call that shows the token; none without one. Raises as read_tokens."""
    if credentials is None or credentials.token_file is None:
        return ()
    return (("authorization", f"Bearer {read_tokens('credentials.token_file', Path(credentials.token_file))[0]}"),)


def check_secret(field: str, path: Path) -> None:
    """Raises InvalidArgument for a file that every user of the machine may read."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise InvalidArgument(field, f"{path} cannot be read: {error.strerror}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise InvalidArgument(field, f"{path} is open to every user of the machine; chmod 600 {path}")


def _check_pair(cert: tuple[str, Path], key: tuple[str, Path]) -> None:
    for field, path in (cert, key):
        read_file(field, path)
    try:
        # An encrypted key is refused here; without a password OpenSSL would ask the terminal for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert[1], key[1], password="")
    except (ssl.SSLError, ValueError) as error:
        problem = f"{key[1]} is no unencrypted PEM key of the certificate {cert[1]}: {error}"
        raise InvalidArgument(key[0], problem) from error


def read_file(field: str, path: Path) -> bytes:
    """The content of a file that `field` names. Raises InvalidArgument for one that cannot be read, or is no regular file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would be waited for, and a device has no end
            raise InvalidArgument(field, f"{path} is not a regular file")
        return path.read_bytes()
    except OSError as error:
        raise InvalidArgument(field, f"{path} cannot be read: {error.strerror}") from error
