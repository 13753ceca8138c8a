"""What `onekernel info` knows about a model: read from headers, with the present device's memory speed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from onekernel.config import EngineConfig, ModelConfig
from onekernel.device.host import default_threads
from onekernel.device.resolve import resolve_device
from onekernel.engine.load import Listener, choose_dtype, open_tokenizer
from onekernel.measure.bandwidth import read_bandwidth
from onekernel.models.registry import model_config
from onekernel.models.sizes import bytes_read_per_token, weight_bytes
from onekernel.text.thinking import find_tags
from onekernel.weights.open import LoadFormat, local_path, open_checkpoint


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes are bytes, rates tokens per second for one sequence."""

    name: str
    source: str
    config: ModelConfig
    parameters: int
    stored_bytes: int | None
    """None if there are no files here: a hub id, or a configuration alone."""
    stored_types: dict[str, int]
    """Stored type -> number of tensors; empty without files."""
    dtype: str
    memory_bytes: int
    weight_bytes_per_token: int
    kv_bytes_per_token: int
    context_limit: int
    chat_template: bool
    thinking_tags: tuple[str, str] | None
    eos_token_ids: list[int]
    device: str
    read_gbps: float
    """Measured now, 1e9 bytes per second."""
    limit_tokens_per_s: float
    """read_gbps over the bytes of a token at the beginning."""
    limit_tokens_per_s_full_context: float


def read_facts(
    model: str,
    options: EngineConfig,
    *,
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    listener: Listener | None = None,
) -> ModelFacts:
    """Open the model, read its headers and measure the device; raises what `load_engine` raises for its files.

    Of a hub id only the settings are fetched, and a shipped configuration needs no `load_format`.
    """
    listener = listener or Listener()
    torch.set_num_threads(options.threads or default_threads())
    resolved = resolve_device(options.device)
    listener.detail(f"device {resolved.device} ({resolved.reason})")
    has_files = load_format == "auto" and local_path(model).exists()
    load_format = "auto" if has_files else "dummy"  # which opens the settings alone
    checkpoint = open_checkpoint(model, revision=revision, load_format=load_format, progress=listener.note)
    try:
        settings, tensors = checkpoint.settings, checkpoint.tensors if has_files else {}
        config = model_config(settings.config)
        tokenizer = open_tokenizer(settings, config)
    finally:
        checkpoint.close()
    dtype = choose_dtype(options.dtype, config, resolved.device)
    per_token = bytes_read_per_token(config, dtype.itemsize, resolved.device)
    kv_per_token = config.kv_bytes_per_token(dtype.itemsize)
    template = tokenizer.chat_template
    tags = find_tags("\n".join(template.sources.values())) if template else None
    rate = read_bandwidth(resolved.device)
    return ModelFacts(
        name=settings.name,
        source=settings.source,
        config=config,
        parameters=config.parameters,
        stored_bytes=sum(info.stored_bytes for info in tensors.values()) if has_files else None,
        stored_types=dict(Counter(info.stored_type for info in tensors.values()).most_common()),
        dtype=str(dtype).removeprefix("torch."),
        memory_bytes=weight_bytes(config, dtype.itemsize, resolved.device),
        weight_bytes_per_token=per_token,
        kv_bytes_per_token=kv_per_token,
        context_limit=config.context_limit,
        chat_template=template is not None,
        thinking_tags=None if tags is None else (tags.open, tags.close),
        eos_token_ids=sorted(tokenizer.eos_token_ids),
        device=resolved.device,
        read_gbps=rate / 1e9,
        limit_tokens_per_s=rate / per_token,
        limit_tokens_per_s_full_context=rate / (per_token + kv_per_token * config.context_limit),
    )
