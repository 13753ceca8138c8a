"""Random weights for any config.json: the same for the same name and shape, whatever is read first.

Scaled so that the residual stream neither fades nor grows with depth and greedy text does not fall into a short loop.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from onekernel.config import ModelConfig
from onekernel.errors import ModelError
from onekernel.weights.architectures import model_config
from onekernel.weights.checkpoint import CheckpointSettings, TensorInfo
from onekernel.weights.layout import expected_tensors

_EMBEDDING = 0.02
"""Deviation of the embedding. Small beside the layers' contributions of about 1, so that a tied head does not find
the token it was given the likeliest; the first norm undoes it for the layers."""

_SHARP = 2.0
"""Gain of q and of k. Scores then have a deviation of about 4: attention picks a few positions instead of averaging
all of them away, and the text depends on more than its last token."""

_ATTENTION = 0.5
"""Gain of attention's output. What attention adds is much the same at neighbouring positions; at the gain of the
feed-forward part it wins in deep models, and the text turns repetitive."""

_BIAS = 0.1
_NORM = 0.1
"""Deviations of biases, and of norms around 1."""

_CHUNK_VALUES = 1 << 20
"""Values that a thread makes at once, a multiple of 4."""
_PIECE_VALUES = 1 << 15
"""Values that are turned from one form into the next while a core's caches hold them."""


class DummyCheckpoint:
    """The `Checkpoint` of a config.json alone: bf16 tensors made when they are read."""

    def __init__(self, settings: CheckpointSettings) -> None:
        """Raises ModelError if the config is not whole, UnsupportedModelError for kinds that are not built in."""
        self.settings = settings
        self._config = model_config(settings.config)
        self._shapes = expected_tensors(self._config)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor that the model needs."""
        return {name: TensorInfo(shape, "BF16", 2 * math.prod(shape)) for name, shape in self._shapes.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor of this name, seeded by the name."""
        if name not in self._shapes:
            raise ModelError(f"{self.settings.source}: a {self._config.architecture} has no tensor {name}")
        shape = self._shapes[name]
        centre, deviation = _distribution(name, shape, self._config)
        return _uniform(name, math.prod(shape), centre, deviation).view(shape)

    def close(self) -> None:
        """Do nothing: there is no file."""


def _distribution(name: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[float, float]:
    """Return mean and standard deviation of a tensor's values; a matrix keeps the size of its input but for a gain."""
    if name.endswith(".bias"):
        return 0.0, _BIAS
    if "embed_tokens" in name:
        return 0.0, _EMBEDDING
    gain = 1.0
    if "self_attn.q_" in name or "self_attn.k_" in name:  # projections, and norms where there are some
        gain = _SHARP
    elif "o_proj" in name:
        gain = _ATTENTION
    elif name == "model.norm.weight" and config.tie_word_embeddings:
        gain = 1 / (_EMBEDDING * math.sqrt(config.hidden_size))  # logits of deviation 1, as an untied head has them
    return (gain, gain * _NORM) if len(shape) == 1 else (0.0, gain / math.sqrt(shape[1]))


def _uniform(name: str, count: int, centre: float, deviation: float) -> torch.Tensor:
    """Return `count` bf16 values spread evenly over centre +- sqrt(3) * deviation, seeded by the name.

    Sixteen bits each of a raw PCG64 stream, which NumPy keeps stable between versions and machines: many times as fast
    as normal deviates, and sums over a row are normal all the same.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    step = math.sqrt(3) * deviation / (1 << 15)
    values = torch.empty(count, dtype=torch.bfloat16)

    def fill(start: int) -> None:
        part = values[start : start + _CHUNK_VALUES]
        stream = np.random.PCG64(seed)
        stream.advance(start // 4)
        words = torch.from_numpy(stream.random_raw(-(-len(part) // 4)).view(np.int16)[: len(part)])
        for to, drawn in zip(part.split(_PIECE_VALUES), words.split(_PIECE_VALUES), strict=True):
            to.copy_(drawn.to(torch.float32).mul_(step).add_(centre))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, range(0, count, _CHUNK_VALUES)))
    return values
