"""Small random models of every architecture, made and judged by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SHAPE = {
    "hidden_size": 96,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def rope(kind: str = "default", theta: float = 10000.0, **values: float) -> dict[str, Any]:
    """Return transformers 5's rope_parameters."""
    return {"rope_type": kind, "rope_theta": theta, **values}


LLAMA3_ROPE = rope(
    "llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": ("Llama", {"rope_parameters": rope("linear", factor=4.0)}),
    "llama-dynamic": ("Llama", {"rope_parameters": rope("dynamic", factor=2.0)}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha-head100": ("Llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 100}),
    "smollm2": ("Llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 8,
                          "tie_word_embeddings": True, "rope_parameters": rope(theta=1e5)}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 80}),
    "qwen2": ("Qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 64, "rope_parameters": rope(theta=1e6), "tie_word_embeddings": True}),
    "qwen3-head256": ("Qwen3", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1}),
}  # fmt: skip


def make(name: str, folder: Path, **changes: Any) -> Any:
    """Save a small random model of `MODELS` under `folder` and return transformers' float32 model.

    Weights are drawn wide enough that logits differ by several units and every bias and norm matters.
    """
    import transformers

    family, special = MODELS[name]
    values = {k: v for k, v in {**SHAPE, **special, **changes}.items() if v is not None or k == "sliding_window"}
    config = getattr(transformers, f"{family}Config")(**values)
    torch.manual_seed(sum(map(ord, name)))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            wide = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.3 if parameter.ndim == 1 else wide)
    model.save_pretrained(folder)
    return model


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Return transformers' logits (tokens, vocab_size) for one sequence, in one forward pass."""
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return result
