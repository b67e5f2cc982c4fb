"""The committed code in protos/tasuki/v1 equals the output of the pinned generator for the .proto files."""

import os
import subprocess
import sys
from pathlib import Path

from tools.proto_comments import comments

PROTOS = Path(__file__).parents[2] / "protos"


def test_committed_code_is_what_the_pinned_generator_makes(tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("tasuki/v1/*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", *outputs, *sources],
        cwd=PROTOS,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        check=True,
        capture_output=True,
    )
    made = {path.name: path.read_text() for path in (tmp_path / "tasuki/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (PROTOS / "tasuki/v1").glob("*_pb2*.py*")}
    differing = sorted(name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name))
    assert not differing, f"run `make protos` and commit: {differing}"
    assert (PROTOS / "tasuki/v1/comments.binpb").read_bytes() == comments(), "run `make protos` and commit"
