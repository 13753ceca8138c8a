"""The tensors a model must have: Hugging Face names and shapes, and the check of a checkpoint against them."""

from __future__ import annotations

from onekernel.config import ModelConfig
from onekernel.errors import ModelError
from onekernel.weights.checkpoint import Checkpoint

_NAMED_AT_MOST = 5
_HARMLESS = "rotary_emb.inv_freq"  # written by early Llama converters; follows from rope_theta


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name -> shape (rows first) of every tensor of the model, in the order of the layers."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer(config).items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    matrices = {
        "self_attn.q_proj": (q, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q, config.o_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for name, (rows, columns, bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if config.sub_norms:
        shapes["self_attn.attn_sub_norm.weight"] = (q,)
        shapes["mlp.ffn_sub_norm.weight"] = (inner,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    return shapes


def check_tensors(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Raise ModelError naming every missing, extra or mis-shaped tensor (the first five) with both shapes.

    A tied model may store lm_head.weight (it is not read) and old Llama files may store rotary_emb.inv_freq.
    """
    expected = expected_tensors(config)
    allowed = expected | {"lm_head.weight": expected["model.embed_tokens.weight"]}
    stored = {name: info.shape for name, info in checkpoint.tensors.items() if not name.endswith(_HARMLESS)}
    faults = [f"{name} of shape {expected[name]} is missing" for name in expected if name not in stored]
    for name, shape in stored.items():
        if name not in allowed:
            faults.append(f"{name} of shape {shape} is not part of a {config.architecture} of this config")
        elif shape != allowed[name]:
            faults.append(f"{name} has shape {shape} where the config asks for {allowed[name]}")
    if faults:
        more = f"; and {len(faults) - _NAMED_AT_MOST} more" if len(faults) > _NAMED_AT_MOST else ""
        raise ModelError(
            f"{checkpoint.settings.source} does not match its config: {'; '.join(faults[:_NAMED_AT_MOST])}{more}. "
            "The files are incomplete or belong to another model: fetch it again"
        )
