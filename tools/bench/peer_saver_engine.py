"""One engine of changeover_peers.py: SGLang with torch_memory_saver, as its own Engine starts it. Answers lines on stdin.

On a CPU, where torch_memory_saver does not run, releasing and resuming do nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

NEW_TOKENS = {"max_new_tokens": 1, "temperature": 1.0, "ignore_eos": True}


class SaverEngine:
    """An engine whose methods are the commands that a line on stdin may name."""

    def __init__(self, engine: dict[str, Any]) -> None:
        """engine: SGLang's arguments."""
        self._sleeps = bool(engine.get("enable_memory_saver"))
        self._engine = Engine(**engine)
        # Otherwise flushing SGLang's cache takes half a second.
        self._engine.freeze_gc()

    def release(self, tag: str) -> dict[str, Any]:
        if self._sleeps:
            self._engine.release_memory_occupation(tags=[tag])
        return {}

    def resume(self, tag: str) -> dict[str, Any]:
        if self._sleeps:
            self._engine.resume_memory_occupation(tags=[tag])
        return {}

    def update(self, request: str) -> dict[str, Any]:
        """request: JSON with a payload per trainer rank; this engine takes the one of its GPU."""
        asked = json.loads(request)
        wanted = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[asked["payloads"][asked.get("index", 0)]],
            load_format="flattened_bucket",
            flush_cache=False,
        )
        success, message = self._engine.loop.run_until_complete(
            self._engine.tokenizer_manager.update_weights_from_tensor(wanted)
        )
        assert success, message
        return {}

    def first_token(self) -> dict[str, Any]:
        return self._generate([[5, 6, 7]], num_tokens=1)

    def generate(self, num_prompts: str, prompt_tokens: str, num_tokens: str) -> dict[str, Any]:
        """Generates from a batch of random prompts."""
        vocab_size = self._engine.tokenizer_manager.model_config.vocab_size
        prompts = np.random.default_rng(0).integers(3, vocab_size, (int(num_prompts), int(prompt_tokens))).tolist()
        return self._generate(prompts, num_tokens=int(num_tokens))

    def _generate(self, prompts: list[list[int]], *, num_tokens: int) -> dict[str, Any]:
        started = time.perf_counter()
        sampling = NEW_TOKENS | {"max_new_tokens": num_tokens}
        answers = self._engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        assert all(len(answer["output_ids"]) == num_tokens for answer in answers)
        return {"seconds": time.perf_counter() - started}


def main() -> None:
    arguments = json.loads(sys.argv[1])
    # The parent reads stdout, so only answers may go there; libraries print to stderr.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = SaverEngine(arguments)
    for line in sys.stdin:
        command, *words = line.rstrip("\n").split(" ", 1)
        answer_words = words if command == "update" else " ".join(words).split()
        print(json.dumps(getattr(engine, command)(*answer_words)), flush=True)
    os._exit(0)  # the engine's processes end with this one


if __name__ == "__main__":
    main()
