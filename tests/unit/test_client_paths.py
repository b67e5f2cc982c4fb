"""Paths at which a remote caller may have files written and read."""

from pathlib import Path

import pytest

from tasuki.config.load import load_config
from tasuki.rpc.access import ClientPaths
from tasuki.rpc.methods import PathUse
from tasuki.wire.errors import InvalidArgument, PermissionDenied

_TRAIN = '[train]\ndataset = "d"\noutput_dir = "out"\n[train.reward]\nfunction = "a:b"\n'
_OUTSIDE = ("other/a", "runs", "runs-2/a", "state/a", "state/run/restart-trainer", "state/checkpoints", "")


@pytest.fixture
def paths(tmp_path: Path) -> ClientPaths:
    for name in ("state/checkpoints", "runs/deep", "given", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    for link in ("runs/link", "runs/deep/link", "short"):
        (tmp_path / link).symlink_to(tmp_path / "elsewhere")
    write = (tmp_path / "state/checkpoints", tmp_path / "runs", tmp_path / "short")
    return ClientPaths(state_dir=tmp_path / "state", write=write, read=(tmp_path / "given",))


@pytest.mark.parametrize("name", ["runs/a", "runs/new/b", "state/checkpoints/c", "short/a", "elsewhere/a"])
def test_paths_below_a_writable_folder_are_allowed_by_each_of_its_names(paths: ClientPaths, tmp_path: Path, name: str) -> None:
    for use in PathUse:
        paths.check(f"{tmp_path}/{name}", use=use)


def test_a_readable_folder_is_not_written(paths: ClientPaths, tmp_path: Path) -> None:
    paths.check(f"{tmp_path}/given/a", use=PathUse.READ)
    with pytest.raises(PermissionDenied) as denied:
        paths.check(f"{tmp_path}/given/a", use=PathUse.WRITE)
    assert denied.value.metadata == {"path": f"{tmp_path}/given/a", "key": "paths.write"}


@pytest.mark.parametrize(
    ("name", "kind", "problem"),
    [
        *((name, PermissionDenied, "below no folder") for name in _OUTSIDE),
        *((name, PermissionDenied, "leads through a link") for name in ("runs/link/a", "runs/link", "runs/deep/link/a")),
        ("runs/../runs/a", InvalidArgument, r"without `\.\.`"),
        (f"runs/{'a' * 300}/b", InvalidArgument, "cannot be looked at"),
    ],
)
def test_other_paths_are_refused(paths: ClientPaths, tmp_path: Path, name: str, kind: type[Exception], problem: str) -> None:
    for use in PathUse:
        with pytest.raises(kind, match=problem):
            paths.check(f"{tmp_path}/{name}", use=use)


@pytest.mark.parametrize("text", ["runs/a", "", "/", "/tmp/../etc/a", "/runs/a\0b", f"/{'a' * 5000}"])
def test_other_text_is_a_typed_error(paths: ClientPaths, text: str) -> None:
    with pytest.raises((InvalidArgument, PermissionDenied)):
        paths.check(text, use=PathUse.WRITE)


@pytest.mark.parametrize(
    ("state_dir", "tables", "written", "read", "refused"),
    [
        ("out/node", _TRAIN, ["out/checkpoints", "out/node/checkpoints"], [], ["out/node", "out/node/run", "out/node/logs"]),
        ("node", '[paths]\nwrite = ["saved"]\nread = ["given"]\n', ["saved"], ["given"], ["node/checkpoints", "given"]),
    ],
    ids=["a state folder inside a writable one", "named folders in place of the default ones"],
)
def test_folders_follow_from_the_configuration(
    tmp_path: Path, state_dir: str, tables: str, written: list[str], read: list[str], refused: list[str]
) -> None:
    (config := tmp_path / "node.toml").write_text(f'state_dir = "{state_dir}"\n[model]\npath = "m"\n{tables}')
    paths = ClientPaths.of(load_config(config))
    for name, use in [*((name, PathUse.WRITE) for name in written), *((name, PathUse.READ) for name in read)]:
        paths.check(f"{tmp_path}/{name}/1", use=use)
    for name in refused:
        with pytest.raises(PermissionDenied):
            paths.check(f"{tmp_path}/{name}/1", use=PathUse.WRITE)
