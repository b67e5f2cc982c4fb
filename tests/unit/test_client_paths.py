"""Paths at which a remote caller may have files written and read."""

from pathlib import Path

import pytest

from tasuki.config.load import load_config
from tasuki.rpc.access import ClientPaths
from tasuki.rpc.methods import PathUse
from tasuki.wire.errors import InvalidArgument, PermissionDenied


@pytest.fixture
def paths(tmp_path: Path) -> ClientPaths:
    for name in ("state/checkpoints", "runs", "given", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    write = (tmp_path / "state/checkpoints", tmp_path / "runs")
    return ClientPaths(state_dir=tmp_path / "state", write=write, read=(tmp_path / "given",))


@pytest.mark.parametrize("name", ["runs/a", "runs/new/b", "state/checkpoints/c"])
@pytest.mark.parametrize("use", PathUse)
def test_paths_below_a_writable_folder_are_allowed(paths: ClientPaths, tmp_path: Path, name: str, use: PathUse) -> None:
    paths.check(f"{tmp_path}/{name}", use=use)


def test_a_readable_folder_is_not_written(paths: ClientPaths, tmp_path: Path) -> None:
    paths.check(f"{tmp_path}/given/a", use=PathUse.READ)
    with pytest.raises(PermissionDenied) as denied:
        paths.check(f"{tmp_path}/given/a", use=PathUse.WRITE)
    assert denied.value.metadata == {"path": f"{tmp_path}/given/a", "key": "paths.write"}


@pytest.mark.parametrize(
    "name", ["elsewhere/a", "runs", "runs-2/a", "state/a", "state/run/restart-trainer", "state/checkpoints", ""]
)
def test_paths_outside_are_refused(paths: ClientPaths, tmp_path: Path, name: str) -> None:
    for use in PathUse:
        with pytest.raises(PermissionDenied, match="below no folder"):
            paths.check(f"{tmp_path}/{name}", use=use)


@pytest.mark.parametrize("text", ["runs/a", "", "/", "/tmp/../etc/a", "/runs/a\0b", f"/{'a' * 5000}"])
def test_other_text_is_a_typed_error(paths: ClientPaths, text: str) -> None:
    with pytest.raises((InvalidArgument, PermissionDenied)):
        paths.check(text, use=PathUse.WRITE)


def test_dots_are_refused_even_where_they_lead_back(paths: ClientPaths, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"without `\.\.`"):
        paths.check(f"{tmp_path}/runs/../runs/a", use=PathUse.WRITE)


def test_a_name_that_no_system_takes_is_a_typed_error(paths: ClientPaths, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot be looked at"):
        paths.check(f"{tmp_path}/runs/{'a' * 300}/b", use=PathUse.WRITE)


@pytest.mark.parametrize("name", ["runs/link/a", "runs/link", "runs/deep/link/a"])
def test_links_below_a_folder_are_not_followed(paths: ClientPaths, tmp_path: Path, name: str) -> None:
    (tmp_path / "runs/deep").mkdir()
    for link in ("runs/link", "runs/deep/link"):
        (tmp_path / link).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionDenied, match="leads through a link"):
        paths.check(f"{tmp_path}/{name}", use=PathUse.WRITE)


def test_a_folder_that_is_a_link_is_known_by_both_names(paths: ClientPaths, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(tmp_path / "elsewhere")
    linked = ClientPaths(state_dir=tmp_path / "state", write=(tmp_path / "short",), read=())
    linked.check(f"{tmp_path}/short/a", use=PathUse.WRITE)
    linked.check(f"{tmp_path}/elsewhere/a", use=PathUse.WRITE)


def test_a_state_folder_inside_a_writable_one_stays_closed(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(
        'state_dir = "out/node"\n[model]\npath = "m"\n'
        '[train]\ndataset = "d"\noutput_dir = "out"\n[train.reward]\nfunction = "a:b"\n'
    )
    paths = ClientPaths.of(load_config(config))
    paths.check(f"{tmp_path}/out/checkpoints/1", use=PathUse.WRITE)
    paths.check(f"{tmp_path}/out/node/checkpoints/1", use=PathUse.WRITE)
    for name in ("out/node/a", "out/node/run/planted", "out/node/logs/a"):
        with pytest.raises(PermissionDenied):
            paths.check(f"{tmp_path}/{name}", use=PathUse.WRITE)


def test_named_folders_replace_the_default_ones(tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text('state_dir = "node"\n[model]\npath = "m"\n[paths]\nwrite = ["saved"]\nread = ["given"]\n')
    paths = ClientPaths.of(load_config(config))
    paths.check(f"{tmp_path}/saved/1", use=PathUse.WRITE)
    paths.check(f"{tmp_path}/given/1", use=PathUse.READ)
    with pytest.raises(PermissionDenied):
        paths.check(f"{tmp_path}/node/checkpoints/1", use=PathUse.WRITE)
