"""`tasuki certs`: the files it writes, and a second run in the same folder."""

import stat
from pathlib import Path

import pytest
from cryptography import x509

from tasuki.cli.__main__ import main
from tasuki.cli.certs import run
from tasuki.wire.errors import InvalidArgument

NAMES = ["ca", "node", "operator", "peer", "trainer", "viewer"]


def load(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_command_makes_an_authority_and_a_pair_for_each_role(tmp_path: Path) -> None:
    assert main(["certs", str(tmp_path / "lab"), "--host", "node-a", "--host", "10.0.0.7", "--days", "2"]) == 0
    folder = tmp_path / "lab"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.{kind}" for name in NAMES for kind in ("key", "pem")
    )
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.glob("*.key"))
    node = load(folder / "node.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {"node-a", "localhost"} <= set(node.get_values_for_type(x509.DNSName))
    assert {"10.0.0.7", "127.0.0.1", "::1"} == {str(address) for address in node.get_values_for_type(x509.IPAddress)}
    viewer = load(folder / "viewer.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert viewer.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://tasuki.lab/tasuki/viewer"]


def test_again_in_the_same_folder_makes_new_certificates_of_the_same_authority(tmp_path: Path) -> None:
    run(tmp_path, hosts=["a"], days=1)
    before = {name: load(tmp_path / f"{name}.pem") for name in NAMES}
    run(tmp_path, hosts=["a"], days=1)
    after = {name: load(tmp_path / f"{name}.pem") for name in NAMES}
    assert [name for name in NAMES if before[name] == after[name]] == ["ca"]
    for name in NAMES[1:]:
        after[name].verify_directly_issued_by(after["ca"])


def test_nothing_is_written_for_an_invalid_host(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="host: 'a b' is neither"):
        run(tmp_path / "lab", hosts=["node-a", "a b"], days=1)
    assert not (tmp_path / "lab").exists()


def test_renewal_without_hosts_keeps_the_names_and_the_role(tmp_path: Path) -> None:
    def names() -> tuple[set[str], list[str]]:
        value = load(tmp_path / "node.pem").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts = {*value.get_values_for_type(x509.DNSName), *map(str, value.get_values_for_type(x509.IPAddress))}
        return hosts, value.get_values_for_type(x509.UniformResourceIdentifier)

    run(tmp_path, hosts=["node-a", "10.0.0.7"], days=1, is_fleet=True)
    first, serial = names(), load(tmp_path / "node.pem").serial_number
    assert {"node-a", "10.0.0.7"} < first[0] and first[1] == ["spiffe://tasuki.lab/tasuki/peer"]
    assert main(["certs", str(tmp_path)]) == 0
    assert names() == first and load(tmp_path / "node.pem").serial_number != serial
    run(tmp_path, hosts=["node-b"], days=1)
    assert names() == ({"node-b", "localhost", "127.0.0.1", "::1"}, [])
    run(tmp_path, hosts=[], days=1)
    assert names() == ({"node-b", "localhost", "127.0.0.1", "::1"}, [])
    (tmp_path / "node.pem").write_text("damaged")
    with pytest.raises(InvalidArgument, match="node.pem has no names to renew: .*; give --host"):
        run(tmp_path, hosts=[], days=1)


def test_a_folder_with_another_key_is_left_alone(tmp_path: Path) -> None:
    run(tmp_path, hosts=["a"], days=1)
    (tmp_path / "ca.key").write_bytes((tmp_path / "node.key").read_bytes())
    with pytest.raises(InvalidArgument, match="not the key of"):
        run(tmp_path, hosts=["a"], days=1)
    for days in (0, 99_999_999):
        with pytest.raises(InvalidArgument, match="days: .* between 1 and 3650"):
            run(tmp_path / "other", hosts=["a"], days=days)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidArgument, match="folder: .*/file/certs cannot be created: "):
        run(tmp_path / "file" / "certs", hosts=["a"], days=1)
