"""Folders that a caller at a port may name; every other path on the machine is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tasuki.config.paths import client_checkpoints_dir
from tasuki.config.schema import NodeConfig
from tasuki.rpc.methods import PathUse
from tasuki.wire.errors import InvalidArgument, PermissionDenied


class ClientPaths:
    """Folders of `paths.write` and `paths.read`. The state folder, with its sockets, is excluded, but not folders listed below it."""

    def __init__(self, *, state_dir: Path, write: Sequence[Path], read: Sequence[Path]) -> None:
        self._state_dir = state_dir.absolute()
        self._folders = {
            PathUse.WRITE: [folder.absolute() for folder in write],
            PathUse.READ: [folder.absolute() for folder in (*write, *read)],
        }

    @classmethod
    def of(cls, config: NodeConfig) -> ClientPaths:
        write = config.paths.write
        if write is None:
            runs = [table.output_dir for table in (config.train, config.sft) if table is not None]
            write = (client_checkpoints_dir(config.state_dir), *runs)
        return cls(state_dir=config.state_dir, write=write, read=config.paths.read)

    def check(self, text: str, *, use: PathUse) -> None:
        """Raises InvalidArgument for a relative path or one with `..`, PermissionDenied for one outside the folders of this use.

        A link below such a folder is refused, too. The folder itself, or a folder above it, may be a link: the administrator made it.
        """
        path = Path(text)
        if not path.is_absolute() or ".." in path.parts or "\0" in text:
            raise InvalidArgument("path", f"{text!r} must be absolute and without `..`")
        folder = self._innermost(path, use)
        try:
            link = None if folder is None else next(_links(path, folder), None)
        except OSError as error:
            raise InvalidArgument("path", f"{text!r} cannot be looked at: {error.strerror}") from error
        if folder is None or link is not None:
            why = (
                f"{text!r} is below no folder of {_KEYS[use]}"
                if link is None
                else f"{text!r} leads through a link, {str(link)!r}"
            )
            raise PermissionDenied(
                f"{why}; a caller at a port may name paths below {', '.join(map(str, self._folders[use])) or 'no folder'}",
                path=text,
                key=_KEYS[use],
            )

    def _innermost(self, path: Path, use: PathUse) -> Path | None:
        """Nearest folder above `path`, as spelled in the path; None if there is none, or it is the state folder."""
        allowed = {name: True for folder in self._folders[use] for name in (folder, folder.resolve())}
        names = {self._state_dir: False, self._state_dir.resolve(): False, **allowed}
        above = [name for name in names if name in path.parents]
        nearest = max(above, key=lambda name: len(name.parts), default=None)
        return nearest if nearest is not None and names[nearest] else None


_KEYS = {PathUse.WRITE: "paths.write", PathUse.READ: "paths.read"}


def _links(path: Path, folder: Path) -> Iterator[Path]:
    """Links between `folder` and `path`, excluding both."""
    at = folder
    for part in path.relative_to(folder).parts:
        at /= part
        if at.is_symlink():
            yield at
