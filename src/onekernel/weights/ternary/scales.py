"""What the scales of a stored ternary tensor must be, whichever way a file means them."""

from __future__ import annotations

import torch

from onekernel.errors import ModelError


def check_scales(scales: torch.Tensor, name: str) -> None:
    """Raise ModelError, naming the tensor and the first scale that is not, unless all are finite and above 0."""
    sound = scales.isfinite() & (scales > 0)
    if not bool(sound.all()):
        raise ModelError(
            f"{name} has a scale of {float(scales[~sound][0]):g}; scales must be finite and above 0: the file is "
            "damaged, fetch it or convert the model again"
        )
