"""An SGLang engine with our memory, started as the service starts it, in which SGLang's own weight updates work too."""

from collections.abc import Callable, Sequence
from typing import Any

SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "enable_memory_saver": True,
    # Room for a whole copy of the weights beside an engine and a trainer; after a changeover the KV cache takes it.
    "mem_fraction_static": 0.2,
    "disable_cuda_graph": True,
    "sleep_on_idle": True,
    "log_level": "warning",
}


def start_engine(
    arguments: dict[str, Any], *, tp_size: int, scheduler: Callable[..., None] | None = None, loaders: Sequence[str] = ()
) -> Any:
    """scheduler: runs in every rank instead of the service's scheduler; loaders: names that SGLang may call as weight loaders."""
    from contextlib import nullcontext

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    from tasuki.rollout.sglang.scheduler import run_scheduler

    class NoSaver:
        configure_subprocess = staticmethod(nullcontext)

    class ArenaEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler if scheduler is None else scheduler)

    TorchMemorySaverAdapter.create = staticmethod(lambda enable: NoSaver())  # pyright: ignore[reportAttributeAccessIssue]
    return ArenaEngine(**arguments, tp_size=tp_size, custom_weight_loader=[*loaders])
