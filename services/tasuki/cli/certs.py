"""Creates certificates for a lab: a CA, one for its nodes, one for each role. Elsewhere, use the existing CA."""

import ipaddress
import os
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tasuki.config.schema import CallerRole
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument
from tasuki.wire.regular_file import read_regular

_TRUST_DOMAIN = "spiffe://tasuki.lab"
_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_AUTHORITY_DAYS = 3650
_CLOCKS_DIFFER = timedelta(minutes=5)
_MAX_BYTES = 1 << 20
_PEM = serialization.Encoding.PEM
_HOST = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*")


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def run(folder: Path, *, hosts: Sequence[str], days: int, is_fleet: bool = False) -> int:
    """Writes ca, node, viewer, trainer, operator and peer to `folder`, each as .pem and .key. Keeps an existing CA.

    hosts: names and addresses of nodes; without any, those of the certificate to renew, or of this machine. is_fleet: whether nodes call
    each other with the node's certificate, which then has the role peer; without hosts, a role to renew is kept.

    Raises InvalidArgument for an invalid host, number of days or folder.
    """
    if not 1 <= days <= _AUTHORITY_DAYS:
        raise InvalidArgument("days", f"{days} must be between 1 and {_AUTHORITY_DAYS}, the authority's own validity")
    for host in hosts:
        _general_name(host)  # refuses an invalid one before anything is written
    with named_if_denied(folder, key="folder"):
        return _write_certificates(folder, hosts=hosts, days=days, is_fleet=is_fleet)


def _write_certificates(folder: Path, *, hosts: Sequence[str], days: int, is_fleet: bool) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except PermissionError:
        raise
    except OSError as error:
        raise InvalidArgument("folder", f"{folder} cannot be created: {error.strerror}") from error
    if not (folder / "ca.pem").exists() and not (folder / "ca.key").exists():
        made = make_authority()
        key = made.key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        write_pair(folder, "ca", made.cert.public_bytes(_PEM), key)
    authority = read_authority(folder)
    until = datetime.now(UTC) + timedelta(days=days)
    renewed = None if hosts else _read_names(folder / "node.pem")
    known, was_peer = renewed or ([socket.gethostname()], False)
    names = [*(hosts or known), *_THIS_MACHINE]
    peer_id = f"{_TRUST_DOMAIN}/tasuki/{CallerRole.PEER.label}" if is_fleet or was_peer else None
    write_pair(folder, "node", *issue(authority, "tasuki node", hosts=names, spiffe_id=peer_id, until=until))
    for role in CallerRole:
        spiffe_id = f"{_TRUST_DOMAIN}/tasuki/{role.label}"
        write_pair(folder, role.label, *issue(authority, f"tasuki {role.label}", spiffe_id=spiffe_id, until=until))
    sys.stdout.write(f"{folder}: certificates until {until:%Y-%m-%d} for {', '.join(dict.fromkeys(names))}\n")
    return 0


def _read_names(path: Path) -> tuple[list[str], bool] | None:
    """Hosts of the certificate at `path`, and whether it has a role; None if there is none. Raises InvalidArgument if it cannot be read."""
    try:
        cert = x509.load_pem_x509_certificate(read_regular(path, max_bytes=_MAX_BYTES))
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except FileNotFoundError:
        return None
    except PermissionError:
        raise
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise InvalidArgument("host", f"{path} has no names to renew: {error}; give --host") from error
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return hosts, bool(names.get_values_for_type(x509.UniformResourceIdentifier))


def make_authority(*, until: datetime | None = None) -> Authority:
    """Creates a CA with a new key and a unique name. until: in ten years by default."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"tasuki lab {secrets.token_hex(4)}"
    builder = _builder(name, None, key.public_key(), until=until or datetime.now(UTC) + timedelta(days=_AUTHORITY_DAYS))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=True), critical=True)
    return Authority(builder.sign(key, hashes.SHA256()), key)


def read_authority(folder: Path) -> Authority:
    """Reads ca.pem and ca.key. Raises InvalidArgument if they are missing or do not match."""
    try:
        key = serialization.load_pem_private_key(read_regular(folder / "ca.key", max_bytes=_MAX_BYTES), password=None)
        cert = x509.load_pem_x509_certificate(read_regular(folder / "ca.pem", max_bytes=_MAX_BYTES))
    except PermissionError:
        raise
    except (OSError, ValueError, TypeError) as error:
        raise InvalidArgument("folder", f"{folder} has no usable ca.pem and ca.key: {error}; name another folder") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
        raise InvalidArgument("folder", f"ca.key in {folder} is not the key of ca.pem; name another folder")
    return Authority(cert, key)


def issue(
    authority: Authority, name: str, *, until: datetime, hosts: Sequence[str] = (), spiffe_id: str | None = None
) -> tuple[bytes, bytes]:
    """Issues a certificate; returns it and its key as PEM. For a server with `hosts`, for a caller with `spiffe_id` or no `hosts`.

    Raises InvalidArgument for a host that is neither a name nor an address.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_general_name(host) for host in dict.fromkeys(hosts)]
    if spiffe_id is not None:
        names.append(x509.UniformResourceIdentifier(spiffe_id))
    uses = [ExtendedKeyUsageOID.SERVER_AUTH] if hosts else []
    if spiffe_id is not None or not hosts:
        uses.append(ExtendedKeyUsageOID.CLIENT_AUTH)
    builder = _builder(name, authority.cert.subject, key.public_key(), until=until)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(signs_certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(uses), critical=False)
    cert = builder.sign(authority.key, hashes.SHA256())
    plain = serialization.NoEncryption()
    return cert.public_bytes(_PEM), key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, plain)


def write_pair(folder: Path, name: str, cert: bytes, key: bytes) -> None:
    """Writes NAME.pem and NAME.key to the folder, each atomically."""
    for path, content, mode in ((folder / f"{name}.key", key, 0o600), (folder / f"{name}.pem", cert, 0o644)):
        aside = path.with_name(f".{path.name}.new")
        aside.unlink(missing_ok=True)
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        aside.rename(path)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if _HOST.fullmatch(host) is None:
        raise InvalidArgument("host", f"{host!r} is neither the name nor the address of a machine")
    return x509.DNSName(host)


def _builder(
    name: str, issuer: x509.Name | None, key: ec.EllipticCurvePublicKey, *, until: datetime
) -> x509.CertificateBuilder:
    begin = min(datetime.now(UTC), until) - _CLOCKS_DIFFER
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer or subject).public_key(key)
    return builder.serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(until)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
