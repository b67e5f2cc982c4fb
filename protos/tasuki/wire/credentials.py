"""Credentials that a caller presents at a port: a certificate or a token. Read from files, so that no argument holds a secret."""

import re
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.owner import is_planted
from tasuki.wire.regular_file import read_regular

MIN_TOKEN_CHARS = 32
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_MAX_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Credentials:
    """A caller's credentials for a node's ports and the authority it trusts. Files that change are read again between calls.

    ca: PEM of the authority that signed the node's certificate. Without it the connection is plaintext, allowed on loopback only.
    cert, key: PEM of the caller's own certificate, for a node with `security.client_ca`.
    token_file: its first line is the caller's token, for a node with tokens in `security.callers`.

    Raises InvalidArgument for an invalid combination. The files are read when a channel is opened.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    token_file: Path | str | None = None

    def __post_init__(self) -> None:
        if (self.cert is None) is not (self.key is None):
            raise InvalidArgument("credentials", "cert and key go together")
        if self.cert is not None and self.ca is None:
            raise InvalidArgument("credentials", "cert needs ca: the authority that signed the node's certificate")
        if self.ca is None and self.token_file is None:
            raise InvalidArgument("credentials", "give ca, or a token_file for a port on loopback")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one end of a connection, each with the key to name in errors."""

    cert: tuple[str, Path] | None = None
    key: tuple[str, Path] | None = None
    ca: tuple[str, Path] | None = None

    @property
    def paths(self) -> list[Path]:
        return [path for _, path in filter(None, (self.cert, self.key, self.ca))]

    def read(self) -> "TlsMaterial":
        """Raises InvalidArgument naming the key of a file that is missing, invalid, mismatched or readable by every user."""
        if self.key is not None:
            check_secret(*self.key)
        if self.cert is not None and self.key is not None:
            _check_pair(self.cert, self.key)
        cert, key, ca = (None if file is None else read_file(*file) for file in (self.cert, self.key, self.ca))
        if ca is not None and self.ca is not None:
            try:
                # Comments may be in any language.
                ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca.decode("ascii", errors="ignore"))
            except (ssl.SSLError, ValueError) as error:
                raise InvalidArgument(self.ca[0], f"{self.ca[1]} holds no certificates in PEM: {error}") from error
        return TlsMaterial(cert=cert, key=key, ca=ca)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Contents of TlsFiles at one moment, PEM."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


def tls_files(credentials: Credentials) -> TlsFiles:
    def named(field: str) -> tuple[str, Path] | None:
        path = getattr(credentials, field)
        return None if path is None else (f"credentials.{field}", Path(path))

    return TlsFiles(cert=named("cert"), key=named("key"), ca=named("ca"))


def read_tokens(field: str, path: Path) -> tuple[str, ...]:
    """Reads the tokens in a file, one per line. Skips blank lines and lines that start with #.

    Raises InvalidArgument naming `field`, never the token, for a file that is empty, has a short token or is readable by every user.
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
            field, f"{path} must hold tokens of {MIN_TOKEN_CHARS} characters or more, one per line; create one: {advice}"
        )
    return tokens


def read_headers(field: str, path: Path) -> dict[str, str]:
    """Reads HTTP headers, one `name: value` per line; names become lower case. Skips blank lines and lines that start with #.

    Raises InvalidArgument naming `field`, never a value, for a file without headers, with another line, or readable by every user.
    """
    check_secret(field, path)
    try:
        lines = [line.strip() for line in read_file(field, path).decode("ascii").splitlines()]
    except UnicodeDecodeError as error:
        raise InvalidArgument(field, f"{path} is not ASCII") from error
    headers: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if line and not line.startswith("#"):
            name, separator, value = line.partition(":")
            if not separator or not _HEADER_NAME.fullmatch(name) or not value.strip().isprintable():
                raise InvalidArgument(field, f"line {number} of {path} is no header; write it as `name: value`")
            headers[name.lower()] = value.strip()
    if not headers:
        raise InvalidArgument(field, f"{path} holds no headers; write one per line, as `authorization: Bearer ...`")
    return headers


def authorization(credentials: Credentials | None) -> tuple[tuple[str, str], ...]:
    """Metadata that carries the token; empty without one. Raises as read_tokens."""
    if credentials is None or credentials.token_file is None:
        return ()
    return (("authorization", f"Bearer {read_tokens('credentials.token_file', Path(credentials.token_file))[0]}"),)


def check_secret(field: str, path: Path) -> None:
    """Raises InvalidArgument for a file that every user of the machine can read."""
    try:
        with named_if_denied(path, key=field):
            mode = path.stat().st_mode
    except OSError as error:
        advice = "; `tasuki certs` makes it" if field == "security.key" and isinstance(error, FileNotFoundError) else ""
        raise InvalidArgument(field, f"{path} cannot be read: {error.strerror}{advice}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise InvalidArgument(field, f"{path} is open to every user of the machine; chmod 600 {path}")


def _check_pair(cert: tuple[str, Path], key: tuple[str, Path]) -> None:
    for field, path in (cert, key):
        read_file(field, path)
    try:
        # Refuse encrypted keys here: without a password OpenSSL would prompt on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert[1], key[1], password="")
    except (ssl.SSLError, ValueError) as error:
        problem = f"{key[1]} is not an unencrypted PEM key for the certificate {cert[1]}: {error}"
        raise InvalidArgument(key[0], problem) from error


def read_file(field: str, path: Path) -> bytes:
    """Reads the file that `field` names, which decides who is trusted.

    Raises PathPermissionDenied, and InvalidArgument if it is unreadable, not a regular file, or if every user of the machine can change
    or replace it. So can they where another user's file or link lies in a folder such as /tmp.
    """
    try:
        with named_if_denied(path, key=field):
            content, real = read_regular(path, max_bytes=_MAX_BYTES), path.resolve()
        if any(_is_open_to_all(each) for each in {path.absolute().parent, real.parent, real}):
            raise InvalidArgument(field, f"every user of the machine can replace {path}; chmod o-w the file and its folder")
        if is_planted(path) or is_planted(real):
            raise InvalidArgument(
                field, f"{path} is another user's, in a folder that every user can write to; move it to your own"
            )
    except OSError as error:
        raise InvalidArgument(field, f"{path} cannot be read: {error.strerror}") from error
    return content


def _is_open_to_all(path: Path) -> bool:
    """Whether every user can write the file or replace files of the folder; a sticky one, as /tmp, protects others' files."""
    mode = path.stat().st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
