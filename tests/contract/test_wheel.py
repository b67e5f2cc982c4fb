"""The wheel: its content, and that it works alone in a clean environment with only its base dependencies."""

import os
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = ROOT / ".uv/bin/uv"
HEAVY = {"torch", "transformers", "sglang", "safetensors", "triton"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_the_three_roots_as_one_namespace(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "tasuki/__init__.py" not in names
    packages = {name.split("/")[1] for name in names if name.startswith("tasuki/")}
    assert packages == {
        "v1", "wire", "config", "models", "rpc", "memory", "planner", "weights", "algorithms",
        "coordinator", "fleet", "trainer", "rollout", "node", "runs", "trackers", "doctor", "dashboard", "gateway",
        "cli", "client",
    }  # fmt: skip
    assert {f"tasuki/{package}/py.typed" for package in packages} <= names
    assert "tasuki/memory/libtasuki_memory.so" in names
    page = (ROOT / "services/tasuki/dashboard/static").iterdir()
    assert {f"tasuki/dashboard/static/{file.name}" for file in page} <= names
    assert {f"tasuki/v1/trainer{end}" for end in (".proto", "_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")} <= names


def test_wheel_holds_every_source_as_a_real_file(wheel: Path) -> None:
    sources = {
        path.relative_to(ROOT / root).as_posix(): path.read_bytes()
        for root in ("protos", "services", "client")
        for path in (ROOT / root / "tasuki").rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {
            name: archive.read(name) for name in archive.namelist() if name.startswith("tasuki/") and name.endswith(".py")
        }
    assert packed == sources


def test_base_dependencies_are_light(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        requires = message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])
    base = {line.split(">")[0].split("=")[0].split("<")[0].strip() for line in requires if "extra ==" not in line}
    assert base
    assert not base & HEAVY


@pytest.fixture(scope="module")
def clean_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes an environment with the wheel and its locked base dependencies, from uv's cache, which `make` has filled."""
    if not UV.exists():
        pytest.skip("no .uv/bin/uv; `make setup` puts it there")
    venv = tmp_path_factory.mktemp("clean") / "venv"
    env = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(venv), "UV_PYTHON_DOWNLOADS": "never", "UV_OFFLINE": "1"}
    sync = [UV, "sync", "--frozen", "--no-default-groups", "--no-install-project", "--python", sys.executable]
    done = subprocess.run(sync, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0 and "network" in done.stderr.lower():
        pytest.skip(f"uv's cache lacks the base dependencies and tests use no network: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    python = venv / "bin/python"
    install = [UV, "pip", "install", "--no-deps", "--python", python, wheel]
    subprocess.run(install, env=env, check=True, capture_output=True)
    return python


def test_clean_install_has_no_torch_and_a_working_client(clean_python: Path) -> None:
    script = (
        "import sys, importlib.util as u, tasuki.client as c; print(c.__file__, [n for n in sys.argv[1:] if u.find_spec(n)])"
    )
    out = subprocess.run(
        [clean_python, "-I", "-c", script, *sorted(HEAVY)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    assert out.endswith("client/__init__.py []")
    assert str(clean_python.parents[1]) in out


def test_clean_install_has_a_working_command(clean_python: Path) -> None:
    done = subprocess.run([clean_python.parent / "tasuki", "--help"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert {"up", "down", "train", "state", "watch"} <= set(done.stdout.split())
