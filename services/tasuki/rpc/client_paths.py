"""Folders that a caller at a port may name: everything else on the machine is the node's user's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tasuki.config.places import client_checkpoints_dir
from tasuki.config.schema import NodeConfig
from tasuki.rpc.methods import PathUse
from tasuki.wire.errors import InvalidArgument, PermissionDenied


class ClientPaths:
    """The folders of `paths.write` and `paths.read`. What lies in the state folder, such as its sockets, is in none but those below it."""

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
        """Raises InvalidArgument for a path that is relative or has `..` in it, PermissionDenied for one that is not below a folder for
        this use, or leads through a link there.

        A link above such a folder, or the folder itself as one, is the administrator's.
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
        """The folder nearest above `path`, under the name that the path has it by; None when that is the state folder, or none is."""
        allowed = {name: True for folder in self._folders[use] for name in (folder, folder.resolve())}
        names = {self._state_dir: False, self._state_dir.resolve(): False, **allowed}
        above = [name for name in names if name in path.parents]
        nearest = max(above, key=lambda name: len(name.parts), default=None)
        return nearest if nearest is not None and names[nearest] else None


_KEYS = {PathUse.WRITE: "paths.write", PathUse.READ: "paths.read"}


def _links(path: Path, folder: Path) -> Iterator[Path]:
    """What is a link on the way from `folder` to `path`, both without."""
    at = folder
    for part in path.relative_to(folder).parts:
        at /= part
        if at.is_symlink():
            yield at
