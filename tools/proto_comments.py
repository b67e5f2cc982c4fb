"""Prints the comments of protos/tasuki/v1/*.proto for gRPC reflection, as a FileDescriptorSet of names and source locations alone."""

import subprocess
import sys
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

_PROTOS = Path(__file__).parents[1] / "protos"


def comments() -> bytes:
    sources = sorted(str(path.relative_to(_PROTOS)) for path in _PROTOS.glob("tasuki/v1/*.proto"))
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", "--include_source_info", "--descriptor_set_out=/dev/stdout"]
    made = subprocess.run([*protoc, *sources], cwd=_PROTOS, check=True, capture_output=True).stdout
    kept = FileDescriptorSet()
    for file in FileDescriptorSet.FromString(made).file:
        places = [one for one in file.source_code_info.location if one.leading_comments or one.trailing_comments]
        kept.file.add(name=file.name).source_code_info.location.extend(places)
    return kept.SerializeToString(deterministic=True)


if __name__ == "__main__":
    sys.stdout.buffer.write(comments())
