"""The architectures as the rest sees them: config.json -> `ModelConfig`, the tensors to expect, the shipped configs.

They live in `weights/`, because reading and faking a model's files needs them too.
"""

from __future__ import annotations

from onekernel.weights.architectures import ARCHITECTURES, model_config
from onekernel.weights.layout import check_tensors, expected_tensors
from onekernel.weights.shipped import shipped_configs

__all__ = ["ARCHITECTURES", "check_tensors", "expected_tensors", "model_config", "shipped_configs"]
