"""All that tasuki changes in SGLang, and every private name of it that we use; tests/integration/engine_parts/names.py lists them."""

from tasuki.rollout.sglang.cpu.kernels import install_cpu_kernels

install_cpu_kernels()
