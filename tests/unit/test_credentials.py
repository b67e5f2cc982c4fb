"""Files with secrets and certificates: refusals, reloads after a change, and those that `tasuki certs` writes."""

import os
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from tasuki.cli import certs
from tasuki.cli.__main__ import main
from tasuki.cli.certs import run
from tasuki.config.schema import CallerRole
from tasuki.rpc.access import read_certificates
from tasuki.rpc.access import read_tokens as admitted_tokens
from tasuki.wire.channel import open_channel
from tasuki.wire.credentials import Credentials, TlsFiles, read_tokens
from tasuki.wire.errors import InvalidArgument, PathPermissionDenied
from tasuki.wire.reloaded import Reloaded
from tests.owners import give_away
from tests.refusal import refusing


def secret(path: Path, text: str, *, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


READERS = [lambda path: read_tokens("f", path), read_certificates, lambda path: TlsFiles(ca=("f", path)).read()]


def test_tokens_are_lines(tmp_path: Path) -> None:
    first, second = secrets.token_hex(16), secrets.token_hex(16)
    assert read_tokens("f", secret(tmp_path / "t", f"# ours\n{first}\n\n  {second}\n")) == (first, second)


@pytest.mark.parametrize("read", READERS)
def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "fifo", mode=0o600)
    with pytest.raises(InvalidArgument, match="is not a regular file"):
        read(tmp_path / "fifo")


TWO_WORDS = f"{'a' * 20} {'b' * 20}"
BAD_TOKENS = ("short", TWO_WORDS, "é" * 40, "a" * 40 + "\\n")
CALLERS = [(f'[tokens]\n"{token}" = "{role}"\n', token) for token in BAD_TOKENS for role in ("viewer", "admin")]


@pytest.mark.parametrize(
    ("read", "field", "files"),
    [
        (READERS[0], "f", [("", ""), ("\n# nothing\n", ""), *((f"{token}\n", token) for token in ("short", TWO_WORDS, "é" * 40))]),
        (admitted_tokens, "security.callers", [("", ""), ("[tokens]\n", ""), (f'[certificates]\n{"a" * 40} = "viewer"\n', ""), *CALLERS]),
    ],
)  # fmt: skip
def test_a_file_without_a_good_token_is_refused_without_telling_it(
    tmp_path: Path, read: Callable[[Path], object], field: str, files: list[tuple[str, str]]
) -> None:
    for text, token in files:
        with refusing(field) as refused:
            read(secret(tmp_path / "t", text))
        assert not token or token not in refused.value.message


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o602])
def test_a_secret_that_every_user_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    for read, text in ((READERS[0], "a" * 40), (admitted_tokens, f'[tokens]\n{"a" * 40} = "viewer"\n')):
        with pytest.raises(InvalidArgument, match="chmod 600"):
            read(secret(tmp_path / "t", text, mode=mode))


@pytest.mark.parametrize("opened", ["file", "folder"])
@pytest.mark.parametrize("read", READERS)
def test_a_file_that_every_user_may_replace_decides_nothing(tmp_path: Path, read: Callable[[Path], object], opened: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    file = secret(folder / "file", "a" * 40)
    if opened == "file":
        file.chmod(0o622)
    else:
        folder.chmod(0o777)
    with pytest.raises(InvalidArgument, match="every user of the machine|is open to every user"):
        read(file)
    file.chmod(0o600)
    folder.chmod(0o1777)  # as /tmp: only the owner may replace a file
    with suppress(InvalidArgument):  # the text is not a certificate
        read(file)


@pytest.mark.parametrize("planted", ["file", "link"])
def test_a_file_that_another_user_put_into_an_open_folder_decides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)  # anybody can create a missing file here, such as a token that was just deleted
    file = secret(folder / "token" if planted == "file" else tmp_path / "elsewhere", "a" * 40)
    if planted == "link":
        (folder / "token").symlink_to(file)
    assert read_tokens("f", folder / "token") == ("a" * 40,)
    give_away(folder / "token", monkeypatch)
    # The kernel may refuse to follow the link.
    with pytest.raises((InvalidArgument, PathPermissionDenied), match="another user's|permission denied"):
        read_tokens("f", folder / "token")


def test_tls_files_are_checked_by_key(tmp_path: Path) -> None:
    assert certs.run(tmp_path, hosts=["a"], days=1) == 0

    def read(**names: str) -> None:
        TlsFiles(**{field: (f"security.{field}", tmp_path / name) for field, name in names.items()}).read()

    read(cert="node.pem", key="node.key", ca="ca.pem")
    secret(tmp_path / "open.key", (tmp_path / "node.key").read_text(), mode=0o644)
    secret(tmp_path / "rubbish", "rubbish")
    for names, field in (
        ({"cert": "node.pem", "key": "viewer.key"}, "security.key"),
        ({"cert": "node.pem", "key": "open.key"}, "security.key"),
        ({"cert": "gone.pem", "key": "node.key"}, "security.cert"),
        ({"cert": "rubbish", "key": "node.key"}, "security.key"),
        ({"ca": "rubbish"}, "security.ca"),
        ({"ca": "node.key"}, "security.ca"),
    ):
        with refusing(field):
            read(**names)


@pytest.mark.parametrize("given", [{}, {"cert": "a"}, {"cert": "a", "key": "b"}, {"ca": "a", "key": "b"}])
def test_credentials_that_no_port_takes_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="credentials"):
        Credentials(**given)


@pytest.mark.parametrize("target", ["10.0.0.1:5000", "node-a:5000", "dns:///127.0.0.1:5000", "[fe80::1]:5000"])
def test_no_plaintext_channel_leaves_the_machine(target: str, tmp_path: Path) -> None:
    token = Credentials(token_file=secret(tmp_path / "t", "a" * 40))
    for credentials in (None, token):
        with pytest.raises(InvalidArgument, match="give credentials with `ca`"):
            open_channel(target, credentials=credentials)


def test_a_changed_file_is_read_again_and_a_broken_one_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "roles.toml"
    path.write_text('[certificates]\n"a" = "viewer"\n')
    kept = Reloaded([path], lambda: read_certificates(path))
    closed = Reloaded([path], lambda: read_certificates(path), broken={})
    path.write_text('[certificates]\n"a" = "operator"\n')
    assert kept.value == closed.value == {"a": CallerRole.OPERATOR}
    path.write_text('[certificates]\n"a" = "emperor"\n')
    assert kept.value == {"a": CallerRole.OPERATOR}
    assert closed.value == {}
    path.unlink()
    assert (kept.value, closed.value) == ({"a": CallerRole.OPERATOR}, {})
    path.write_text('[certificates]\n"a" = "viewer"\n')
    assert kept.value == closed.value == {"a": CallerRole.VIEWER}


@pytest.mark.parametrize(
    "text",
    [
        "rubbish",
        '"a" = "viewer"\n',
        '[certificates]\n"a" = 1\n',
        '[certificates]\n"a" = "admin"\n',
        pytest.param(f"a = {'[' * 10_000}", id="deep"),
    ],
)
def test_a_table_of_roles_that_is_wrong_names_its_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "roles.toml").write_text(text)
    with refusing("security.callers"):
        read_certificates(tmp_path / "roles.toml")


def test_an_encrypted_key_is_refused_and_no_password_is_asked_for(tmp_path: Path) -> None:
    assert certs.run(tmp_path, hosts=["a"], days=1) == 0
    key = serialization.load_pem_private_key((tmp_path / "node.key").read_bytes(), password=None)
    locked = serialization.BestAvailableEncryption(b"password")
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    files = TlsFiles(
        cert=("security.cert", tmp_path / "node.pem"), key=("security.key", secret(tmp_path / "locked.key", pem.decode()))
    )
    with pytest.raises(InvalidArgument, match="not an unencrypted PEM key"):
        files.read()


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
