"""Weights of the right names, shapes and size for a config.json, in a sparse file: of each tensor only the last row is not zero."""

import json
import math
from pathlib import Path

from tasuki.models.config_json import read_json_object
from tasuki.models.known import read_model
from tasuki.models.stored_tensors import stored_shapes


def write_sparse_weights(folder: Path) -> Path:
    """Writes model.safetensors in bfloat16 beside config.json."""
    header, end = {}, 0
    for name, shape in stored_shapes(read_model(read_json_object(folder / "config.json", field="test")).shape).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    with file.open("r+b") as opened:
        for tensor in header.values():
            num_values = math.prod(tensor["shape"][1:]) if len(tensor["shape"]) > 1 else tensor["shape"][0]
            opened.seek(8 + len(text) + tensor["data_offsets"][1] - 2 * num_values)
            opened.write(b"\x80\x3f" * num_values)
    return file
