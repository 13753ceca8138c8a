"""The least time of a token: what it takes to read the weights once."""

from __future__ import annotations

import torch

from onekernel.engine.load import Loaded
from onekernel.measure.bandwidth import read_bandwidth


def read_limit_us(loaded: Loaded) -> float | None:
    """Return the microseconds in which the GPU reads what one token needs of the weights, at a rate measured now.

    Of sparse feed-forwards that is what the tokens of the last launch needed.

    None on a CPU, where a cache may hold part of the weights, and where the GPU has no room left to measure. The cache
    of keys and values, which a token reads too, is left out: near the end of a long context the true limit is higher.
    """
    device = loaded.engine.backend.device
    if not device.startswith("cuda"):
        return None
    # Packed weights can be smaller than the dtype says; unpacked ones hold an embedding of which one row is read.
    dense_bytes = loaded.config.parameters_read_per_token * loaded.dtype.itemsize
    read_bytes = min(dense_bytes, loaded.engine.backend.memory.weights_bytes)
    read_bytes -= getattr(loaded.engine.backend, "resting_bytes", 0)
    try:
        return read_bytes / read_bandwidth(device) * 1e6
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()
