"""`tasuki doctor`: each fault of the GPUs is found: driver, compilers, peer access, other processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasuki.doctor.finding import Finding, Verdict
from tasuki.doctor.gpus import Gpu, GpuFacts, check_compilers, check_driver, check_peers, check_strangers, gpu_findings
from tasuki.wire.extras import install_extras
from tests.unit.doctor import is_bad, is_ok

GB = 10**9


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_an_nvcc_older_than_torchs_cuda_is_found_in_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = "Cuda compilation tools, release 12.4, V12.4.131"
    write_program(tmp_path / "nvcc", f'[ "$1" = --version ] && echo "{said}"')
    write_program(tmp_path / "cc", "true")
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = GpuFacts((13, 0), [Gpu("H100", 80 * GB, 79 * GB, {})])

    def compilers() -> Finding:
        findings = gpu_findings(facts, torch_cuda=(13, 0), node_runs=False)
        return next(finding for finding in findings if finding.name == "compilers")

    assert is_bad(compilers(), Verdict.WARN, found="nvcc of CUDA 12.4, torch is built for 13.0", advice="PATH")
    for broken in ("exit 1", "echo nothing", f'echo "{said}"; exit 1', "printf '\\377'"):
        write_program(tmp_path / "nvcc", broken)
        assert is_bad(compilers(), Verdict.WARN, found="version is unknown", advice="--version")


def test_faults_of_gpus_are_found():
    free = Gpu("H100", 80 * GB, 79 * GB + GB // 2, {})
    assert is_bad(check_driver(None, torch_cuda=(13, 0)), Verdict.FAIL, found="no NVIDIA driver", advice='device = "cpu"')
    assert is_bad(check_driver((12, 8), torch_cuda=(13, 0)), Verdict.FAIL, found="CUDA 12.8", advice="CUDA 13")
    assert is_bad(check_driver((13, 0), torch_cuda=(13, 1)), Verdict.WARN, found="13.0", advice="13.1")
    assert is_bad(
        check_driver((13, 0), torch_cuda=None), Verdict.WARN, found="torch", advice=install_extras("trainer", "rollout")
    )
    assert is_ok(check_driver((13, 1), torch_cuda=(13, 0)))
    assert is_bad(check_compilers(None, None), Verdict.FAIL, found="no C compiler", advice="gcc")
    assert is_bad(check_compilers(None, "/usr/bin/cc"), Verdict.WARN, found="no nvcc", advice="nvcc")
    both, cuda = ("/cuda/bin/nvcc", "/usr/bin/cc"), (13, 0)
    assert is_bad(
        check_compilers(*both, nvcc_cuda=(12, 8), torch_cuda=cuda),
        Verdict.WARN,
        found="CUDA 12.8, torch is built for 13.0",
        advice="13.0",
    )
    assert is_bad(
        check_compilers(*both, nvcc_cuda=None, torch_cuda=cuda), Verdict.WARN, found="unknown", advice="nvcc --version"
    )
    assert is_ok(check_compilers(*both, nvcc_cuda=(13, 0), torch_cuda=cuda))
    assert is_ok(check_compilers(*both, nvcc_cuda=(13, 1), torch_cuda=cuda))
    assert is_bad(check_peers([(0, 1)], num_gpus=2), Verdict.WARN, found="0-1", advice="same GPU")
    assert is_ok(check_peers([], num_gpus=8)) and is_ok(check_peers([], num_gpus=1))
    held = Gpu("H100", 80 * GB, 20 * GB, {4711: 60 * GB})
    assert is_bad(
        check_strangers([free, held], node_runs=False), Verdict.WARN, found="pid 4711 (60.0 GB on GPU 1)", advice="end these"
    )
    hidden = Gpu("H100", 80 * GB, 20 * GB, {})
    assert is_bad(check_strangers([hidden], node_runs=False), Verdict.WARN, found="not visible", advice="on the host")
    assert is_ok(check_strangers([held], node_runs=True)) and is_ok(check_strangers([free], node_runs=False))
    assert [finding.name for finding in gpu_findings(GpuFacts(None), torch_cuda=None, node_runs=False)] == ["driver"]
