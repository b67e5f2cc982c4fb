"""Environment that the engine and the trainer's ranks inherit from the shell that started the node."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasuki.rollout.__main__ import cache_variables, foreign_variables
from tasuki.trainer.launch import foreign_variables as foreign_to_ranks


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_CACHE_DIR", "SGL_ENABLE_JIT_DEEPGEMM", "NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCHINDUCTOR_MAX_AUTOTUNE", "TRITON_INTERPRET", "ONEDNN_DEFAULT_FPMATH_MODE",
        "SYNC_TOKEN_IDS_ACROSS_TP", "FLASHINFER_LOGGING", "PROMETHEUS_MULTIPROC_DIR",
    ],
)  # fmt: skip
def test_what_may_change_a_number_or_where_metrics_go_is_dropped(name: str) -> None:
    assert foreign_variables([name, "HOME"]) == [name]


@pytest.mark.long  # imports torch's compiler
def test_compiled_kernels_of_the_engine_are_kept_in_the_nodes_folder_unless_another_is_given(tmp_path: Path) -> None:
    kept = cache_variables(tmp_path, given=("HOME",))
    assert cache_variables(tmp_path, given=("TORCHINDUCTOR_CACHE_DIR",)) == {}
    script = "from torch._inductor.runtime.cache_dir_utils import cache_dir; print(cache_dir())"
    # The next start of a node does not find the folder of temporary files.
    environment = {**os.environ, "TMPDIR": str(tmp_path / "run"), **kept}
    command = [sys.executable, "-c", script]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found) == tmp_path / "compiled-engine" and Path(found).is_dir()


def test_ranks_keep_all_but_settings_of_the_compiler() -> None:
    dropped = [
        "TORCHDYNAMO_DISABLE",
        "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
        "TORCH_COMPILE_DISABLE",
        "UNSAFE_SKIP_FSDP_MODULE_GUARDS",
    ]
    kept = [
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_LOGS",
        "TORCH_NCCL_BLOCKING_WAIT",
        "CUDA_HOME",
        "CXX",
        "OMP_NUM_THREADS",
        "TRITON_CACHE_DIR",
    ]
    assert foreign_to_ranks([*kept, *dropped]) == dropped
