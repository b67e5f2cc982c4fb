"""Files with secrets and certificates: refusals, and reloads after a change."""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tasuki.cli import certs
from tasuki.config.schema import CallerRole
from tasuki.rpc.access import read_certificates
from tasuki.rpc.access import read_tokens as admitted_tokens
from tasuki.wire.channel import open_channel
from tasuki.wire.credentials import Credentials, TlsFiles, read_tokens
from tasuki.wire.errors import InvalidArgument, PathPermissionDenied
from tasuki.wire.reloaded import Reloaded
from tests.owners import give_away


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
        with pytest.raises(InvalidArgument) as refused:
            read(secret(tmp_path / "t", text))
        assert refused.value.metadata["field"] == field
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
        with pytest.raises(InvalidArgument) as refused:
            read(**names)
        assert refused.value.metadata["field"] == field, names


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
    with pytest.raises(InvalidArgument) as refused:
        read_certificates(tmp_path / "roles.toml")
    assert refused.value.metadata["field"] == "security.callers"


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
