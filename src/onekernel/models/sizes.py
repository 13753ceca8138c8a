"""Bytes of a model's weights, in memory and read for a token: dense, or ternary with one or a quarter byte a weight."""

from __future__ import annotations

from onekernel.config import ModelConfig, Ternary

SCALE_BYTES = 4


def weight_bytes(config: ModelConfig, element_bytes: int, device: str) -> int:
    """Return the bytes of all weights on `device`; `element_bytes` is the size of a dense value."""
    if config.ternary is None:
        return config.parameters * element_bytes
    tables = 1 if config.tie_word_embeddings else 2
    if config.ternary.head == "int8":
        ends = _embedding_bytes(config, element_bytes, device) + _head_bytes(config, element_bytes, device)
    else:
        ends = tables * _embedding_bytes(config, element_bytes, device)
    return _layer_bytes(config, config.ternary, device) * config.num_hidden_layers + ends + 4 * config.hidden_size


def bytes_read_per_token(config: ModelConfig, element_bytes: int, device: str) -> int:
    """Return the bytes of weights one decode step reads: every layer, the final norm and the head, an embedding row."""
    if config.ternary is None:
        return config.parameters_read_per_token * element_bytes
    layers = _layer_bytes(config, config.ternary, device) * config.num_hidden_layers
    row = _embedding_bytes(config, element_bytes, device) // config.vocab_size
    return layers + _head_bytes(config, element_bytes, device) + row + 4 * config.hidden_size


def _layer_bytes(config: ModelConfig, ternary: Ternary, device: str) -> int:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = [
        (config.q_size, hidden),
        (config.kv_size, hidden),
        (config.kv_size, hidden),
        (hidden, config.q_size),
        (inner, hidden),
        (inner, hidden),
        (hidden, inner),
    ]
    matrices = sum(_ternary_bytes(rows, columns, ternary.group, device) for rows, columns in shapes)
    dense = config.layer_parameters - sum(rows * columns for rows, columns in shapes)  # norms and biases
    return matrices + 4 * dense


def _embedding_bytes(config: ModelConfig, element_bytes: int, device: str) -> int:
    if config.ternary is not None and config.ternary.head == "ternary":
        return _ternary_bytes(config.vocab_size, config.hidden_size, config.ternary.group, device)
    return config.vocab_size * config.hidden_size * element_bytes


def _head_bytes(config: ModelConfig, element_bytes: int, device: str) -> int:
    if config.ternary is not None and config.ternary.head == "int8":
        return config.vocab_size * (config.hidden_size + SCALE_BYTES)
    return _embedding_bytes(config, element_bytes, device)


def _ternary_bytes(rows: int, columns: int, group: int | None, device: str) -> int:
    """Two bits a weight on a GPU, a byte where PyTorch multiplies; scales for rows or groups."""
    codes = rows * columns // 4 if device.startswith("cuda") else rows * columns
    return codes + SCALE_BYTES * rows * (1 if group is None else columns // group)
