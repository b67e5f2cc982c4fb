"""Seeds of samples: which calls repeat each other's samples and which never do."""

import hashlib
import json
import uuid
from array import array
from dataclasses import dataclass
from pathlib import Path

from tasuki.v1.rollout_pb2 import GenerateRequest
from tasuki.wire.errors import NO_ROOM, DiskFull

_SEED_BITS = 62


def question(request: GenerateRequest) -> str:
    """Digest that is equal for calls with the same content, whatever their ids."""
    lengths = [len(prompt.token_ids) for prompt in request.prompts]
    asked = hashlib.sha256(repr((lengths, request.num_samples, given_sampling(request), request.first_prompt)).encode())
    for prompt in request.prompts:
        asked.update(array("q", prompt.token_ids))  # there may be millions of tokens
        for image in prompt.images:
            asked.update(hashlib.sha256(image).digest())
    return asked.hexdigest()


def given_sampling(request: GenerateRequest) -> dict[str, object]:
    """What the caller set, by SGLang's names."""
    params = request.sampling_params
    given: dict[str, object] = {field.name: value for field, value in params.ListFields()}
    if params.stop_token_ids:
        given["stop_token_ids"] = list(params.stop_token_ids)
    if params.stop:
        given["stop"] = list(params.stop)
    if bias := {str(token_id): params.logit_bias[token_id] for token_id in sorted(params.logit_bias)}:
        given["logit_bias"] = bias
    return given


def sample_seed(seed: int | str, *, prompt: int, sample: int) -> int:
    """Seed of one sample: the first 62 bits of the SHA-256 of "SEED/PROMPT/SAMPLE"."""
    digest = hashlib.sha256(f"{seed}/{prompt}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


class CallNumbers:
    """Numbers calls with the same content at one policy version, so that each samples with different seeds.

    A call repeated under its id keeps its number, even after the service was killed and restarted: the numbers are in a file. The file
    is not synced, since it only needs to outlive the process.
    """

    def __init__(self, path: Path, *, instance_id: str) -> None:
        """instance_id: start of the node. A file that another start left at `path` is ignored."""
        self._path, self._instance_id = path, instance_id
        self._version: int | None = None
        self._calls: dict[str, list[str]] = {}
        """Call ids by content, in order."""
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            self._read(line)

    def begin_version(self, version: int | None) -> None:
        """Forgets the calls of any other version."""
        if version != self._version:
            self._version = version
            self._calls.clear()
            self.remove()

    def number(self, question: str, *, call_id: str) -> int:
        """Index of the call among those with the same content. Raises DiskFull, or OSError."""
        calls = self._calls.setdefault(question, [])
        if call_id not in calls:
            self._write([self._instance_id, self._version, question, call_id])
            calls.append(call_id)
        return calls.index(call_id)

    def remove(self) -> None:
        """Removes the file."""
        self._path.unlink(missing_ok=True)

    def _read(self, line: str) -> None:
        try:
            instance_id, version, question, call_id = json.loads(line)
        except ValueError:
            return  # truncated when the service was killed, before the call began
        if instance_id == self._instance_id:
            if version != self._version:
                self._version, self._calls = version, {}
            self._calls.setdefault(question, []).append(call_id)

    def _write(self, entry: list[str | int | None]) -> None:
        try:
            with self._path.open("a") as file:
                # Starts with a newline, since the last line may be truncated.
                file.write(f"\n{json.dumps(entry)}")
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise DiskFull(
                f"{self._path} cannot be written: {error.strerror}; free space, and repeat", path=self._path
            ) from error


@dataclass(frozen=True, slots=True)
class CallSeeds:
    """Seeds of calls, for engines that use them."""

    seed: int
    """`seed` of the configuration."""
    calls: CallNumbers

    def of(self, request: GenerateRequest, *, version: int | None) -> int | str:
        """Base of the samples' seeds.

        Without a caller's seed it depends on the call's content and number, or else on the version and how often that was asked
        before. A restarted engine repeats the lost samples, and asking twice gives different samples.
        """
        if request.sampling_params.HasField("sampling_seed"):
            return request.sampling_params.sampling_seed
        asked = question(request)
        if request.HasField("call_number"):
            return f"{self.seed}/{asked}/call/{request.call_number}"
        self.calls.begin_version(version)
        number = self.calls.number(asked, call_id=request.request_id or uuid.uuid4().hex)
        return f"{self.seed}/{version}/{asked}/{number}"
