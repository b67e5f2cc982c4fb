"""Times of a device's kernels: sums by group, and exposed time."""

from __future__ import annotations

import pytest

from tests.bench.kernel_times import Kernel, group_of, kernel_times


def test_times_are_of_the_whole_span_and_count_overlaps_once() -> None:
    times = kernel_times(
        [
            Kernel("nvjet_tst_256x128", 1.0, 3.0),
            Kernel("ncclDevKernel_AllGather_RING_LL", 2.0, 5.0),
            Kernel("Memcpy DtoH", 4.0, 4.5),
            Kernel("nvjet_tst_256x128", 6.0, 7.0),
        ]
    )
    assert (times.span, times.idle) == (6.0, 1.0)
    assert times.exposed_nccl == pytest.approx(1.5)  # from 3 to 5, minus the copy
    assert times.groups == {"GEMM": 3.0, "NCCL": 3.0, "copies": 0.5}
    assert times.dearest["nvjet_tst_256x128"] == 3.0


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object", "attention"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>", "optimizer"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "GEMM"),
        ("void at::native::elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<at::native::CUDAFunctor_add<c10::BFloat16>>", "pointwise"),
        ("_fold", "vocabulary"),
    ],
)
def test_a_kernel_is_known_by_its_name(name: str, group: str) -> None:
    assert group_of(name) == group
