"""One engine of sync_peers.py with its front, which takes weights by our sync and by SGLang's own calls. Answers lines on stdin."""

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqInput, UpdateWeightsFromTensorReqInput

from tasuki.rollout.rollout import RankCalls
from tasuki.rollout.sync import WeightSync
from tasuki.v1 import weights_pb2
from tools.bench.peer_engine import BENCH_LOADER, SOCKET_DIR, command_payload, run_scheduler
from tools.bench.peer_start import SETTINGS, start_engine
from tools.bench.sync_ranks import answer


class PeerFront:
    """An engine on neighbouring GPUs. Each line that `run` reads names one of its methods."""

    def __init__(self, *, index: int, tp_size: int, model_path: str, folder: Path) -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())
        arguments = {"model_path": model_path, "base_gpu_id": index * tp_size, **SETTINGS}
        self._index, self._tp_size = index, tp_size
        self._folder = folder / f"engine-{index}"
        self._folder.mkdir()
        os.environ[SOCKET_DIR] = str(self._folder)  # for the ranks, which connect to our front
        self._engine = start_engine(arguments, tp_size=tp_size, scheduler=run_scheduler, loaders=[BENCH_LOADER])

        async def make_sync() -> WeightSync:
            return WeightSync(RankCalls(tp_size, socket_dir=self._folder), socket_dir=folder)

        self._sync = self._engine.loop.run_until_complete(make_sync())

    @classmethod
    def of(cls, index: str, tp_size: str, model_path: str, folder: str) -> "PeerFront":
        """Builds a front from the words of a command line."""
        return cls(index=int(index), tp_size=int(tp_size), model_path=model_path, folder=Path(folder))

    def run(self, line: str) -> dict[str, Any]:
        """Calls a method. line: the method's name and, after a blank, its argument."""
        name, *argument = line.rstrip("\n").split(" ", 1)
        answered: dict[str, Any] = getattr(self, name)(*argument)
        return answered

    def ready(self) -> dict[str, Any]:
        """Answers once the engine is ready."""
        return {}

    def ours(self, published: str) -> dict[str, Any]:
        """published: PublishedWeights in hexadecimal."""
        weights = weights_pb2.PublishedWeights.FromString(bytes.fromhex(published))

        async def sync() -> Any:
            return await self._sync.run(weights, await self._sync.prepare(weights), timeout_s=120)

        report = self._engine.loop.run_until_complete(sync())
        assert not report.fallback_names
        return {"copied_bytes": report.copied_bytes}

    def update(self, request: str) -> dict[str, Any]:
        """request: JSON with a payload per trainer rank, load_format and version; the engine takes those of trainer ranks on its GPUs."""
        asked = json.loads(request)
        first = self._index * self._tp_size
        payloads = asked["payloads"][first : first + self._tp_size]
        return self._call(payloads, load_format=asked["load_format"], version=asked["version"])

    def update_from_ipc(self, request: str) -> dict[str, Any]:
        """request: JSON with a socket path per GPU UUID, and the version. checkpoint-engine waits for the copies."""
        asked = json.loads(request)
        wanted = UpdateWeightsFromIPCReqInput(
            zmq_handles=asked["socket_paths"], flush_cache=False, weight_version=asked["version"]
        )
        return self._wait(self._engine.tokenizer_manager.update_weights_from_ipc(wanted))

    def command(self, text: str) -> dict[str, Any]:
        """Runs peer_engine.run_command on every rank."""
        return self._call([command_payload(text)] * self._tp_size, load_format=BENCH_LOADER, version=None)

    def floors(self) -> dict[str, Any]:
        """Returns each rank's measurements of the links."""
        self.command(f"floors {self._folder}")
        return {"ranks": [json.loads((self._folder / f"floors-{rank}.json").read_text()) for rank in range(self._tp_size)]}

    def _call(self, payloads: list[Any], *, load_format: str | None, version: str | None) -> dict[str, Any]:
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format=load_format, flush_cache=False, weight_version=version
        )
        return self._wait(self._engine.tokenizer_manager.update_weights_from_tensor(request))

    def _wait(self, update: Coroutine[Any, Any, tuple[bool, str]]) -> dict[str, Any]:
        success, message = self._engine.loop.run_until_complete(update)
        assert success, message
        return {}


def main() -> None:
    # The parent reads stdout, so only answers may go there; libraries print to stderr.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    front = PeerFront.of(*sys.argv[1:])
    for line in sys.stdin:
        answer(**front.run(line))
    os._exit(0)  # the engine's processes end with this one


if __name__ == "__main__":
    main()
