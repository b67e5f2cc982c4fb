"""Changed checkpoints whose checksums are recomputed, as if they had been saved that way."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasuki.wire.sealed_json import sealed


def reseal(checkpoint: Path, fields: Mapping[str, Any] | None = None) -> None:
    """fields: new values in checkpoint.json; None keeps its own."""
    file = checkpoint / "checkpoint.json"
    kept = dict(json.loads(file.read_text()) if fields is None else fields)
    kept.pop("crc32", None)
    kept["tensors_crc32"] = zlib.crc32((checkpoint / "tensors.json").read_bytes())
    file.write_text(sealed(kept))
