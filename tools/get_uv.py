"""Installs uv into a folder of the project, without changing the system. Usage: python3 tools/get_uv.py VERSION FOLDER

Tries pip first, then the pip of a temporary venv if the system's Python has none. Debian may have removed that too; then it downloads the
file from the package index and checks its digest.
"""

import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

PIP = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--root-user-action=ignore", "--upgrade", "--target"]


def by_pip(version: str, folder: Path, *, python: str = sys.executable) -> bool:
    return subprocess.run([python, *PIP, str(folder), f"uv=={version}"], check=False).returncode == 0


def by_venv(version: str, folder: Path) -> bool:
    with tempfile.TemporaryDirectory() as place:
        made = subprocess.run([sys.executable, "-m", "venv", place], check=False, stdout=subprocess.DEVNULL)
        return made.returncode == 0 and by_pip(version, folder, python=f"{place}/bin/python")


def by_index(version: str, folder: Path) -> bool:
    with urllib.request.urlopen(f"https://pypi.org/pypi/uv/{version}/json", timeout=60) as answer:
        files = json.load(answer)["urls"]
    libc = "manylinux" if platform.libc_ver()[0] == "glibc" else "musllinux"
    wheel = next(f for f in files if libc in f["filename"] and f["filename"].endswith(f"_{platform.machine()}.whl"))
    with urllib.request.urlopen(wheel["url"], timeout=300) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != wheel["digests"]["sha256"]:
        raise SystemExit(f"{wheel['filename']}: the digest differs from the index's")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        target = folder / "bin" / "uv"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(archive.read(f"uv-{version}.data/scripts/uv"))
        target.chmod(0o755)
    return True


def main() -> None:
    version, folder = sys.argv[1], Path(sys.argv[2])
    # Built beside the target and renamed, so that an interrupted download leaves nothing that looks finished.
    aside = folder.with_name(f"{folder.name}.part{os.getpid()}")
    try:
        if not (by_pip(version, aside) or by_venv(version, aside) or by_index(version, aside)):
            raise SystemExit("uv could not be fetched; is the package index reachable?")
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


if __name__ == "__main__":
    main()
