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
    """scheduler: runs in every rank instead of the service's scheduler; loaders: more names that SGLang may call as weight loaders."""
    from contextlib import nullcontext

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    from tasuki.rollout.rank_commands import COMMAND_LOADER, command_tensors
    from tasuki.rollout.sglang.scheduler import run_scheduler

    class NoSaver:
        configure_subprocess = staticmethod(nullcontext)

    class ArenaEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler if scheduler is None else scheduler)
        num_ranks = tp_size

        async def run_on_ranks(self, command: bytes) -> None:
            payload = MultiprocessingSerializer.serialize(command_tensors(command))
            request = UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload] * tp_size, load_format=COMMAND_LOADER, flush_cache=False
            )
            success, message = await self.tokenizer_manager.update_weights_from_tensor(request)
            assert success, message

    TorchMemorySaverAdapter.create = staticmethod(lambda enable: NoSaver())
    return ArenaEngine(**arguments, tp_size=tp_size, custom_weight_loader=[COMMAND_LOADER, *loaders])
