"""Images of training samples: a call carries each file once, in the first sample that has it."""

from collections.abc import Iterable
from hashlib import sha256

from tasuki.v1.types_pb2 import TrainingSample
from tasuki.wire.errors import InvalidArgument

_DIGEST_BYTES = 32


class Files:
    """The files of a call's samples, read in their order."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def of(self, sample: TrainingSample, *, field: str) -> list[bytes]:
        """The files of the sample's images. Raises InvalidArgument for the SHA-256 of a file that no earlier sample has."""
        files: list[bytes] = []
        for index, entry in enumerate(sample.images):
            if len(entry) != _DIGEST_BYTES:
                self._known[sha256(entry).digest()] = entry
            elif entry not in self._known:
                problem = "is the SHA-256 of an image that no earlier sample of the call has; give the file"
                raise InvalidArgument(f"{field}.images[{index}]", problem)
            files.append(self._known.get(entry, entry))
        return files


def send_once(samples: Iterable[TrainingSample]) -> None:
    """Replaces each file that an earlier sample has by its SHA-256."""
    sent = set[bytes]()
    for sample in samples:
        for index, entry in enumerate(sample.images):
            digest = entry if len(entry) == _DIGEST_BYTES else sha256(entry).digest()
            if digest in sent:
                sample.images[index] = digest
            sent.add(digest)


def restore(samples: Iterable[TrainingSample]) -> None:
    """Inverse of `send_once`. Raises as Files.of."""
    files = Files()
    for index, sample in enumerate(samples):
        if sample.images:
            sample.images[:] = files.of(sample, field=f"samples[{index}]")
