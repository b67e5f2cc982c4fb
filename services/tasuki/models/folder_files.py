"""The files of a Hugging Face model folder that services read."""

import hashlib
from pathlib import Path

from tasuki.models.config_json import read_json_object
from tasuki.models.tokenizer import CHAT_TEMPLATES
from tasuki.wire.denied_path import named_if_denied
from tasuki.wire.errors import InvalidArgument, PathNotFound

INDEX_FILE = "model.safetensors.index.json"
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}
_KEY = "model.path"
_NETWORK = {"beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3"}
_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.overlayfs"}
_TEXTS = (".json", ".jinja", ".model", ".txt")


def model_files(folder: Path) -> list[Path]:
    """Lists configuration, tokenizer and weights. With an index, only the weights that it names: other formats may lie beside them.

    Raises PathNotFound without a folder, PathPermissionDenied, InvalidArgument for an index that cannot be read.
    """
    with named_if_denied(folder, key=_KEY):
        if not folder.is_dir():
            raise PathNotFound(f"{_KEY}: {folder} is not a folder", path=folder)
        weight_map = read_weight_map(folder)
        indexed = None if weight_map is None else set(weight_map.values())
        return sorted(path for path in folder.iterdir() if path.is_file() and _is_read(path, indexed))


def read_weight_map(folder: Path, *, key: str = _KEY) -> dict[str, str] | None:
    """Name of the file of each tensor, or None without an index. Raises PathPermissionDenied, InvalidArgument for a damaged index."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return None
    weight_map = read_json_object(index, field=key).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidArgument(key, f"{index} has no `weight_map`; download it again")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or Path(file).name != file
            or Path(file).suffix != ".safetensors"
            or not file.isprintable()
        ):
            raise InvalidArgument(
                key, f"{index} names {file!r} for {name!r}, which is no safetensors file of the folder; download it again"
            )
    return weight_map


def _is_read(path: Path, indexed: set[str] | None) -> bool:
    if path.suffix == ".safetensors":
        return indexed is None or path.name in indexed
    return path.suffix in _TEXTS


def other_files(folder: Path) -> list[Path]:
    """Lists what an export copies: configuration, generation configuration and tokenizer, everything but weights and adapters."""
    found = sorted(path for path in folder.iterdir() if path.suffix not in WEIGHT_SUFFIXES and path.name != "adapter")
    return [path for path in found if path.is_file() and not path.name.endswith(".index.json")]


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def text_digests(folder: Path) -> dict[str, str]:
    """Digest of each file of configuration, tokenizer and chat templates, by its path in the folder. Raises as model_files."""
    files = (*model_files(folder), *sorted(folder.glob(f"{CHAT_TEMPLATES}/*.jinja")))
    texts = [path for path in files if path.suffix != ".safetensors" and path.name != INDEX_FILE]
    return {str(path.relative_to(folder)): file_digest(path) for path in texts}


def model_files_bytes(folder: Path) -> int:
    """Bytes of these files. Raises as model_files."""
    return sum(path.stat().st_size for path in model_files(folder))


def bytes_to_copy(folder: Path, *, host_bytes: int) -> int:
    """Bytes of a copy in shared memory; 0 for a folder on a local disk, which has the page cache, or above an eighth of the host.

    Raises as model_files.
    """
    num_bytes = model_files_bytes(folder) if is_on_network(folder) else 0
    return num_bytes if num_bytes <= host_bytes // 8 else 0


def is_on_network(folder: Path) -> bool:
    """Whether a file system of the network, or in user space, holds the folder."""
    kinds: dict[Path, str] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        kinds[Path(mount.split()[4].replace("\\040", " "))] = kind.split()[0]
    place = folder.resolve()
    kind = next((kinds[above] for above in (place, *place.parents) if above in kinds), "")
    return kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
