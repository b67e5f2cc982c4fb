"""Certificates whose names almost match a role, at a gRPC port and at the metrics address: both must identify the same caller."""

import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tasuki.client import Credentials
from tasuki.rpc.access import certified_callers
from tasuki.rpc.port import _names_of
from tasuki.wire.channel import open_channel
from tests.integration.port_node import PortNode, make_certs, mtls, port_config, port_node
from tests.integration.raw_calls import code_of

VIEWER = "spiffe://tasuki.lab/tasuki/viewer"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[PortNode]:
    folder = make_certs(tmp_path / "certs")
    async with port_node(port_config(tmp_path, *mtls(folder)), folder) as node:
        yield node


def issue(folder: Path, *uris: str, common_name: str = "someone") -> Credentials:
    """Issues a certificate by the lab's authority."""
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(names, critical=False)
    )
    cert = builder.sign(ca_key, hashes.SHA256())
    (folder / "odd.pem").write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "odd.key").write_bytes(private)
    (folder / "odd.key").chmod(0o600)
    return Credentials(ca=folder / "ca.pem", cert=folder / "odd.pem", key=folder / "odd.key")


@pytest.mark.parametrize(
    ("uris", "is_let_in"),
    [
        ((VIEWER,), True),
        ((VIEWER, VIEWER), False),
        (("https://tasuki.lab/", VIEWER), False),
        ((f"{VIEWER}\0.evil",), False),
        ((f"{VIEWER}/",), False),
        ((f"SPIFFE{VIEWER[6:]}",), False),
        (("spiffe://" + "a" * 3000 + "/tasuki/viewer",), False),
    ],
)
async def test_only_the_one_whole_id_gives_a_role(node: PortNode, uris: tuple[str, ...], is_let_in: bool) -> None:
    credentials = issue(node.folder, *uris)
    async with open_channel(node.target, credentials=credentials) as channel:
        code = await code_of(channel, "/tasuki.v1.CoordinatorService/GetState")
    assert (code is grpc.StatusCode.OK, code is grpc.StatusCode.PERMISSION_DENIED) == (is_let_in, not is_let_in)
    decoded = ssl._ssl._test_decode_cert(str(node.folder / "odd.pem"))

    class Connection:
        def auth_context(self) -> dict[str, list[bytes]]:
            return _names_of(decoded)

    assert (certified_callers(None)(Connection()).role is not None) is is_let_in
