"""Engines of a vision model's text: no tower is built, since none is trained and nobody sends images."""

from typing import Any

from torch import nn


class _NoTower(nn.Module):
    """Takes the tower's place in SGLang's models."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.deepstack_visual_indexes: list[int] = []


def install_text_only(architecture: str) -> None:
    """Leaves the tower out of the models of this process."""
    if architecture.startswith("Gemma3"):
        from sglang.srt.models import gemma3_mm

        gemma3_mm.SiglipVisionModel = gemma3_mm.Gemma3MultiModalProjector = _NoTower
    else:
        from sglang.srt.models import qwen3_vl

        qwen3_vl.Qwen3VLMoeVisionModel = _NoTower
