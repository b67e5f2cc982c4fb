"""deploy/: names in compose.yaml and the Dockerfile exist and fit the rest of the repository. Needs no Docker."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from tasuki.cli.__main__ import _parser
from tasuki.config.load import load_config
from tasuki.supervisor.processes import EXIT_LIMIT_S
from tasuki.supervisor.stop import STOP_TIMEOUT_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
COMMANDS = {
    **{name: SERVICES[name]["command"] for name in ("node", "train")},
    "healthcheck": SERVICES["node"]["healthcheck"]["test"][1:],
}


def folders_of(service: str) -> dict[str, str]:
    """Returns mounts by folder in the container, as they are when no variable is set."""
    pattern = r"(?:\$\{\w+:-([^}]+)\}|([\w./-]+)):([^:]+)(?::ro)?"
    mounts = (re.fullmatch(pattern, text) for text in SERVICES[service].get("volumes", []))
    return {mount[3]: mount[1] or mount[2] for mount in mounts if mount}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_one_that_tasuki_takes(name: str):
    program, *arguments = COMMANDS[name]
    assert program in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert _parser().parse_args(arguments).config == Path("/config/node.toml")


def create_certificates(folder: Path) -> dict[str, Path]:
    """Runs the command of `certs` on this machine, with a folder in place of each volume. Returns them by the volume's name."""
    folders = {volume: folder / inside.lstrip("/") for inside, volume in folders_of("certs").items()}
    for path in folders.values():
        path.mkdir(parents=True, exist_ok=True)
    command: list[str] = [text.replace("$$", "$") for text in SERVICES["certs"]["command"]]
    command = [re.sub(r"(?<=[\s\"])/(?=tls|roles)", f"{folder}/", text) for text in command]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run([*command[:-1], "localhost"], check=True, env={**os.environ, "PATH": path}, capture_output=True, timeout=60)
    return folders


def test_a_container_mounts_the_certificates_of_its_role_alone():
    certificates = set(folders_of("certs").values())
    mounted = {name: {volume for volume in folders_of(name).values() if volume in certificates} for name in SERVICES}
    assert mounted.pop("certs") == {"tls", "tls-node", "tls-viewer"} == {name for name in COMPOSE["volumes"] if "tls" in name}
    assert mounted == {"node": {"tls-node"}, "dashboard": {"tls-node"}, "prometheus": {"tls-viewer"}, "train": set()}
    for name in ("node", "dashboard", "prometheus"):
        assert any(re.fullmatch(r"tls-\w+:/tls:ro", text) for text in SERVICES[name]["volumes"])


def test_a_volume_has_the_key_of_its_role_alone(tmp_path: Path):
    folders = create_certificates(tmp_path)
    for role in ("node", "viewer"):
        files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folders[f"tls-{role}"].iterdir()}
        assert files == {"ca.pem": 0o644, f"{role}.pem": 0o644, f"{role}.key": 0o600}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    create_certificates(tmp_path)
    for path, content in before.items():
        assert (path.read_bytes() == content) is (path.stem == "ca"), f"{path} is renewed unless it is the authority's"


def test_certificates_go_where_the_node_and_prometheus_look_for_them(tmp_path: Path):
    folders = create_certificates(tmp_path)
    (ports,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "deploy.md").read_text(), re.DOTALL | re.MULTILINE)
    named = tomllib.loads(ports)
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "compose.yml").read_text())["scrape_configs"][0]
    for service, files in (
        ("node", named["security"]),
        ("dashboard", named["security"]),
        ("prometheus", scraped["tls_config"]),
    ):
        folder = folders[folders_of(service)["/tls"]]
        assert {f"/tls/{path.name}" for path in folder.iterdir()} == set(files.values())
    (target,) = scraped["static_configs"][0]["targets"]
    host, port = target.split(":")
    node = x509.load_pem_x509_certificate((folders["tls-node"] / "node.pem").read_bytes())
    names = node.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert host in SERVICES and host in names.get_values_for_type(x509.DNSName)
    assert named["metrics"]["listen"].endswith(f":{port}")


def test_the_ports_of_the_page_are_those_that_are_published():
    page = (ROOT / "docs" / "deploy.md").read_text()
    published = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())["services"]["node"]["ports"]
    assert sorted(text.rpartition(":")[2] for text in published) == sorted(re.findall(r'listen = "0\.0\.0\.0:(5\d+)"', page))


def test_only_a_node_that_serves_is_healthy():
    assert _parser().parse_args(COMMANDS["healthcheck"][1:]).serving


def test_a_run_resumes_and_starts_no_node_of_its_own_beside_the_one_of_the_other_container():
    arguments = _parser().parse_args(COMMANDS["train"][1:])
    assert arguments.resume
    assert arguments.no_start


def test_the_example_keeps_to_the_folders_that_are_mounted():
    folders = folders_of("node")
    assert all(len(folders_of(name)) == len(service["volumes"]) for name, service in SERVICES.items())
    assert (DEPLOY / folders["/config"]).resolve() == DEPLOY / "config"
    config = load_config(DEPLOY / folders["/config"] / "node.toml")
    assert config.train is not None
    for path, folder in ((config.state_dir, "/state"), (config.model.path, "/models"), (config.train.output_dir, "/runs")):
        assert path.is_relative_to(folder)
        assert folder in folders


def test_a_volume_has_a_folder_of_the_user_in_the_image():
    ours = [name for name, service in SERVICES.items() if service["image"] == "tasuki"]
    mounts = {mount for name in ours for mount in folders_of(name).items() if mount[1] in COMPOSE["volumes"]}
    named = {folder for folder, _ in mounts}
    assert {volume for _, volume in mounts} == set(COMPOSE["volumes"])
    (made,) = re.findall(r"install --directory --owner=tasuki --group=tasuki (.+)", DOCKERFILE)
    assert set(made.split()) == named


def test_both_services_see_the_same_folders_and_the_run_waits_for_the_node():
    assert folders_of("node") == {**folders_of("train"), "/tls": "tls-node"}
    assert SERVICES["train"]["depends_on"]["node"]["condition"] == "service_healthy"


def test_the_cpu_file_takes_from_a_service_what_it_has():
    text = (DEPLOY / "compose.cpu.yaml").read_text()
    assert "!reset" in text
    for name, keys in yaml.safe_load(text.replace("!reset", ""))["services"].items():
        assert keys.keys() <= SERVICES[name].keys()


def test_the_build_takes_the_arguments_that_it_is_given():
    build = SERVICES["node"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert ROOT / build["dockerfile"] == DEPLOY / "Dockerfile"
    assert build["args"].keys() == set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE)) - {"UV_VERSION"}


def test_what_is_copied_exists_and_is_sent_to_the_build():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = [path for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE) for path in line.split()]
    assert sent == set(copied)
    assert all((ROOT / path).exists() for path in copied)


def test_every_link_in_the_sources_leads_to_something_that_is_sent():
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] not in "#!*"]
    for folder in ("protos", "services", "client"):
        for link in (path for path in (ROOT / folder / "tasuki").rglob("*") if path.is_symlink()):
            target = link.resolve().relative_to(ROOT)
            assert not any(fnmatch(str(part), pattern) for part in (target, *target.parents) for pattern in ignored)
            assert re.search(rf"^COPY {target.parts[0]} ", DOCKERFILE, re.MULTILINE)


def test_python_and_uv_are_those_of_the_makefile_and_of_pyproject():
    makefile = (ROOT / "Makefile").read_text()
    (range_,) = set(re.findall(r"\((3, \d+)\) <= \S+ <= \((3, \d+)\)", makefile + DOCKERFILE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest, highest = (bound.replace(", ", ".") for bound in range_)
    assert project["requires-python"] == f">={lowest}"
    versions = [found for text in project["classifiers"] if (found := text.rpartition(" :: ")[2])[:2] == "3."]
    assert (versions[0], versions[-1]) == (lowest, highest)
    assert re.findall(r"UV_VERSION=(\S+)", DOCKERFILE) == re.findall(r"UV_VERSION := (\S+)", makefile)


def test_docker_waits_for_a_stop_and_for_the_kernel_to_free_memory_as_the_page_says():
    grace_s = SERVICES["node"]["stop_grace_period"].removesuffix("s")
    assert int(grace_s) >= STOP_TIMEOUT_S + EXIT_LIMIT_S
    assert f"The grace period is {grace_s} s" in (ROOT / "docs" / "deploy.md").read_text()


def test_the_page_names_every_variable_of_ours():
    ours = set(re.findall(r"\$\{(TASUKI_\w+)", (DEPLOY / "compose.yaml").read_text()))
    assert set(re.findall(r"`(TASUKI_\w+)`", (ROOT / "docs" / "deploy.md").read_text())) == ours


def test_another_malloc_is_in_the_image_and_preloaded_only_if_it_is_asked_for() -> None:
    base, *_, last = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    assert "libjemalloc2" in base.split()
    lines = [line.strip() for line in last.splitlines()]
    assert lines.index("ARG MALLOC") + 1 == lines.index("ENV LD_PRELOAD=${MALLOC}"), "without a default, so that it is empty"
    assert not any(line.startswith("RUN") for line in lines[lines.index("ARG MALLOC") :]), "nothing of the build is preloaded"
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert "--build-arg MALLOC=libjemalloc.so.2" in page
