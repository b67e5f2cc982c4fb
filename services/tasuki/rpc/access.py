"""Authentication and authorization of callers: certificates, tokens, roles and folders at a port, and the fleet that commands a node."""

import hashlib
import hmac
import re
import ssl
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from tasuki.config.schema import CallerRole, FleetConfig, NodeConfig
from tasuki.rpc.methods import Method, PathUse
from tasuki.v1.fleet_pb2 import FleetCommand
from tasuki.wire.credentials import MIN_TOKEN_CHARS, check_secret, read_file
from tasuki.wire.errors import HeldByFleet, InvalidArgument, PermissionDenied, StaleEpoch, Unauthenticated
from tasuki.wire.reloaded import Reloaded

_SPIFFE = "spiffe:"
_SPIFFE_ROLE = re.compile(r"spiffe://[^/]+/tasuki/([a-z]+)")
_BEARER = "bearer "
_CALLERS = "security.callers"


@dataclass(frozen=True, slots=True)
class Caller:
    """Identified caller. name: shown in refusals, never a secret. role: None for a certificate without one."""

    name: str
    role: CallerRole | None


Callers = Callable[[Any], Caller]
"""Identity of the caller with this context. Raises Unauthenticated for an unknown one."""
_EPOCH_ROLE, _EPOCH_FIELDS = CallerRole.PEER, {"epoch", "fleet"}
"""The least role that may give an epoch, by an optional field: a service refuses older coordinators from then on."""


class Access:
    """Decides whether a call at a port is allowed."""

    def __init__(self, callers: Callers, paths: "ClientPaths | None") -> None:
        """paths: None for any."""
        self._callers, self._paths = callers, paths

    def check(self, method: Method, context: Any) -> CallerRole:
        """Returns the caller's role. Raises Unauthenticated, and PermissionDenied if the role is too low."""
        caller = self._callers(context)
        if method.role is None or caller.role is None or caller.role < method.role:
            raise _denied(caller, method.name, method.role)
        return caller.role

    def check_request(self, method: Method, request: Any, *, role: CallerRole) -> None:
        """Raises PermissionDenied for an epoch or path that the caller's role may not give."""
        if role < _EPOCH_ROLE:
            for field in _EPOCH_FIELDS.intersection(request.DESCRIPTOR.fields_by_name):
                if request.HasField(field):
                    raise _denied(Caller("the caller", role), f"{method.name} with `{field}`", _EPOCH_ROLE)
        if method.path_use is not None and self._paths is not None:
            self._paths.check(request.path, use=method.path_use)


def access_of(config: NodeConfig) -> Access:
    """Access by the configuration. Raises InvalidArgument naming a key of [security] whose file cannot be used."""
    security = config.security
    paths = ClientPaths.of(config)
    if security.client_ca is not None:
        return Access(certified_callers(security.callers), paths)
    if security.callers is not None:
        return Access(token_callers(security.callers), paths)
    return Access(local_caller, paths)


def local_caller(context: Any) -> Caller:
    """Allows everything to every user of the machine: `security.insecure`."""
    return Caller("a user of the machine", CallerRole.PEER)


LOCAL_ACCESS = Access(local_caller, None)
"""At the unix socket."""


def token_callers(path: Path) -> Callers:
    """Identifies callers by the bearer token in the header `authorization`.

    path: `security.callers`, whose deletion revokes its tokens. Raises InvalidArgument if it cannot be used.
    """
    known = Reloaded([path], lambda: {_digest(token): role for token, role in read_tokens(path).items()}, broken={})

    def caller(context: Any) -> Caller:
        given = [value for key, value in context.invocation_metadata() or () if key == "authorization"]
        if len(given) != 1 or not isinstance(given[0], str) or not given[0].lower().startswith(_BEARER):
            raise Unauthenticated('this port asks for one header "authorization: Bearer TOKEN"')
        # Compares digests, and all of them: the time taken reveals nothing about a token.
        digest = _digest(given[0][len(_BEARER) :].strip())
        roles = [role for one, role in known.value.items() if hmac.compare_digest(one, digest)]
        if not roles:
            raise Unauthenticated("this node does not know the token")
        return Caller("the token", roles[0])

    return caller


def certified_callers(path: Path | None) -> Callers:
    """Identifies callers by the certificate that TLS verified: its SPIFFE id, else its common name.

    path: `security.callers`. Raises InvalidArgument if it cannot be used.
    """
    roles = None if path is None else Reloaded([path], lambda: read_certificates(path), broken={})

    def caller(context: Any) -> Caller:
        name = _certified_name(context.auth_context())
        if roles is not None:
            return Caller(ascii(name), roles.value.get(name))
        found = _SPIFFE_ROLE.fullmatch(name)
        return Caller(ascii(name), None if found is None else CallerRole.named(found[1]))

    return caller


def _certified_name(shown: Mapping[str, Sequence[bytes]]) -> str:
    """SPIFFE id, else common name; "" for a common name that looks like an id, since its requester may choose it freely.

    Also "" for a part of a name, since grpc cuts names at a NUL: the certificate, where it is shown, must have exactly this one.
    """
    given = {field: next(iter(shown.get(field, ())), b"") for field in ("peer_spiffe_id", "x509_common_name", "x509_pem_cert")}
    raw = given["peer_spiffe_id"] or given["x509_common_name"]
    name, num = raw.decode(errors="replace"), len(raw)
    if not given["peer_spiffe_id"] and name.lower().startswith(_SPIFFE):
        return ""
    if given["x509_pem_cert"]:
        length = bytes([num]) if num < 0x80 else bytes([0x81, num]) if num < 0x100 else bytes([0x82, *num.to_bytes(2)])
        if length + raw not in ssl.PEM_cert_to_DER_cert(given["x509_pem_cert"].decode("ascii")):
            return ""
    return name


def read_certificates(path: Path) -> dict[str, CallerRole]:
    """Role by name of a certificate, from `security.callers`. Raises InvalidArgument."""
    return _read_callers(path, "certificates", told=lambda name, role: f"{name!r} has the role {role!r}")


def read_tokens(path: Path) -> dict[str, CallerRole]:
    """Role by token, from `security.callers`. Raises InvalidArgument, which never contains a token."""
    check_secret(_CALLERS, path)
    roles = _read_callers(path, "tokens", told=lambda token, role: "a token has another role")
    if not roles or any(len(token) < MIN_TOKEN_CHARS or not re.fullmatch("[!-~]+", token) for token in roles):
        advice = f"create one: openssl rand -hex {MIN_TOKEN_CHARS}"
        raise InvalidArgument(_CALLERS, f"{path} must hold tokens of {MIN_TOKEN_CHARS} characters or more; {advice}")
    return roles


def _read_callers(path: Path, table: str, *, told: Callable[[str, object], str]) -> dict[str, CallerRole]:
    """The only table of the file. told: how an error describes a caller and its role."""
    text = read_file(_CALLERS, path)
    try:
        tables = tomllib.loads(text.decode().removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:  # also the interpreter's limits on digits and nesting
        raise InvalidArgument(_CALLERS, f"{path} is not TOML: {error}") from error
    if tables.keys() != {table} or not isinstance(tables[table], dict):
        needed = "with security.client_ca" if table == "certificates" else "without security.client_ca"
        raise InvalidArgument(_CALLERS, f"{path} must have one table, [{table}], {needed}")
    allowed = {role.label: role for role in CallerRole}
    for name, role in tables[table].items():
        if not isinstance(role, str) or role not in allowed:
            raise InvalidArgument(_CALLERS, f"{path}: {told(name, role)}; give one of {', '.join(allowed)}")
    return {name: allowed[role] for name, role in tables[table].items()}


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def _denied(caller: Caller, what: str, needed: CallerRole | None) -> PermissionDenied:
    has = "no role" if caller.role is None else f"the role {caller.role.label}"
    needs = "is for no caller at a port" if needed is None else f"needs the role {needed.label}"
    return PermissionDenied(
        f"{what} {needs}; {caller.name} has {has}",
        needed="" if needed is None else needed.label,
        role="" if caller.role is None else caller.role.label,
    )


class ClientPaths:
    """Folders of `paths.write` and `paths.read`. The state folder, with its sockets, is excluded, but not folders listed below it."""

    def __init__(self, *, state_dir: Path, write: Sequence[Path], read: Sequence[Path]) -> None:
        self._state_dir = state_dir.absolute()
        self._folders = {
            PathUse.WRITE: [folder.absolute() for folder in write],
            PathUse.READ: [folder.absolute() for folder in (*write, *read)],
        }

    @classmethod
    def of(cls, config: NodeConfig) -> "ClientPaths":
        write = config.paths.write
        if write is None:
            runs = [table.output_dir for table in (config.train, config.sft) if table is not None]
            write = (config.state_dir / "checkpoints", *runs)
        return cls(state_dir=config.state_dir, write=write, read=config.paths.read)

    def check(self, text: str, *, use: PathUse) -> None:
        """Raises InvalidArgument for a relative path or one with `..`, PermissionDenied for one outside the folders of this use.

        A link below such a folder is refused, too. The folder itself, or a folder above it, may be a link: the administrator made it.
        """
        path = Path(text)
        if not path.is_absolute() or ".." in path.parts or "\0" in text:
            raise InvalidArgument("path", f"{text!r} must be absolute and without `..`")
        # The nearest folder above `path`, as spelled in the path.
        allowed = {name: True for folder in self._folders[use] for name in (folder, folder.resolve())}
        names = {self._state_dir: False, self._state_dir.resolve(): False, **allowed}
        nearest = max((name for name in names if name in path.parents), key=lambda name: len(name.parts), default=None)
        if nearest is None or not names[nearest]:
            why = f"{text!r} is below no folder of {_KEYS[use]}"
        elif link := _link(path, nearest):
            why = f"{text!r} leads through a link, {str(link)!r}"
        else:
            return
        raise PermissionDenied(
            f"{why}; a caller at a port may name paths below {', '.join(map(str, self._folders[use])) or 'no folder'}",
            path=text,
            key=_KEYS[use],
        )


_KEYS = {PathUse.WRITE: "paths.write", PathUse.READ: "paths.read"}


def _link(path: Path, folder: Path) -> Path | None:
    """The first link below `folder` in `path`. Raises InvalidArgument if one cannot be looked at."""
    at = folder
    try:
        for part in path.relative_to(folder).parts:
            at /= part
            if at.is_symlink():
                return at
    except OSError as error:
        raise InvalidArgument("path", f"{str(path)!r} cannot be looked at: {error.strerror}") from error
    return None


FLEET_KEY = "tasuki-fleet-bin"
"""Metadata of a call that a fleet makes: a FleetCommand."""
_FOR_CLIENTS = (CallerRole.TRAINER, CallerRole.OPERATOR)


def fleet_metadata(command: FleetCommand) -> tuple[tuple[str, bytes], ...]:
    """Metadata that identifies a call of the fleet."""
    return ((FLEET_KEY, command.SerializeToString()),)


class FleetFence:
    """Admits calls of clients to a node without a fleet, and only the fleet's calls to a node of a fleet."""

    def __init__(self, config: FleetConfig | None) -> None:
        self._config = config

    def check(self, method: Method, context: Any, *, role: CallerRole = CallerRole.PEER) -> None:
        """Raises HeldByFleet for a caller outside the fleet, StaleEpoch for another attempt, PermissionDenied below the role peer.

        Any caller may read. Stage commands are for the node's coordinator, which has an epoch.
        """
        if method.role not in _FOR_CLIENTS:
            return
        command = _command(context)
        if self._config is None:
            if command is not None:
                raise InvalidArgument("fleet", f"this node belongs to no fleet, and is called by {command.name!r}; set [fleet]")
            return
        if command is not None and role < CallerRole.PEER:
            raise PermissionDenied(f"{method.name} for a fleet needs the role peer; the caller has {role.label}", needed="peer")
        config = self._config
        if command is None or command.name != config.name:
            who = "a caller beside it" if command is None else f"fleet {command.name!r}"
            raise HeldByFleet(
                f"the node belongs to fleet {config.name!r} and takes no commands from {who}; call the fleet at {config.leader}",
                fleet=config.name,
                address=config.leader,
            )
        if command.attempt != config.attempt:
            raise StaleEpoch(
                f"the fleet is of attempt {command.attempt} of the job, and the node of {config.attempt}; stop the one that was left "
                "behind",
                epoch=command.attempt,
                current_epoch=config.attempt,
            )


def _command(context: Any) -> FleetCommand | None:
    given = [value for key, value in context.invocation_metadata() or () if key == FLEET_KEY]
    if not given:
        return None
    try:
        return FleetCommand.FromString(given[0])
    except (DecodeError, TypeError) as error:
        raise InvalidArgument("fleet", f"the metadata {FLEET_KEY} is no FleetCommand: {error}") from error
