"""A ternary model in float64 with exact integer products: what every faster version is judged by.

Written from the models' papers and configs, not from the package: no code is shared with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.ternary_models import Floats, TernaryModel


@dataclass(slots=True)
class Oracle:
    """Logits of a model; `quantised` collects the int8 activations of every product, in order."""

    model: TernaryModel
    quantised: list[Floats] = field(default_factory=list)

    def logits(self, ids: list[int]) -> Floats:
        """Return (tokens, vocab) for one sequence."""
        config, prefix = self.model.config, "model.layers"
        x = self._table("model.embed_tokens.weight")[ids]
        for layer in range(config["num_hidden_layers"]):
            at = f"{prefix}.{layer}"
            n = self._norm(x, f"{at}.input_layernorm")
            mixed = self._attention(n, f"{at}.self_attn")
            mixed = self._norm(mixed, f"{at}.self_attn.attn_sub_norm")
            x = x + self._product(mixed, [f"{at}.self_attn.o_proj"])[0]
            n = self._norm(x, f"{at}.post_attention_layernorm")
            gate, up = self._product(n, [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"])
            act = np.maximum(gate, 0) ** 2 if config["hidden_act"] == "relu2" else gate / (1 + np.exp(-gate))
            inner = self._norm(act * up, f"{at}.mlp.ffn_sub_norm")
            x = x + self._product(inner, [f"{at}.mlp.down_proj"])[0]
        x = self._norm(x, "model.norm")
        name = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
        return (
            self._product(x, [name])[0] if f"{name}.weight" in self.model.codes else x @ self._table(f"{name}.weight").T
        )

    def _table(self, name: str) -> Floats:
        if name in self.model.codes:
            return self.model.values(name)
        return self.model.dense[name].numpy().astype(np.float64)

    def _norm(self, x: Floats, name: str) -> Floats:
        weight = self.model.dense.get(f"{name}.weight")
        if weight is None:
            return x
        normed: Floats = (
            x / np.sqrt((x**2).mean(-1, keepdims=True) + self.model.config["rms_norm_eps"]) * weight.numpy()
        )
        return normed

    def _product(self, x: Floats, names: list[str]) -> list[Floats]:
        """Quantise once, multiply by each matrix: int64 sums of each group, times its scale."""
        most = np.maximum(np.abs(x).max(-1, keepdims=True), 1e-5)
        q = np.rint(x * 127 / most)
        self.quantised.append(q)
        results = []
        for name in names:
            codes, scales = self.model.codes[f"{name}.weight"].astype(np.int64), self.model.scales[f"{name}.weight"]
            groups = scales.shape[1]
            whole = q.astype(np.int64).reshape(len(q), groups, -1)
            sums = np.einsum("tgk,ngk->tng", whole, codes.reshape(len(codes), groups, -1))
            results.append((sums * scales.astype(np.float64)).sum(-1) * most / 127)
        return results

    def _attention(self, x: Floats, at: str) -> Floats:
        heads, kv_heads, head_dim = self.model.heads
        q, k, v = self._product(x, [f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"])
        q, k, v = (part.reshape(len(x), -1, head_dim) for part in (q, k, v))
        q, k = self._norm(q, f"{at}.q_norm"), self._norm(k, f"{at}.k_norm")
        theta = self.model.config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
        angle = np.arange(len(x))[:, None] * theta
        q, k = _rotate(q, angle), _rotate(k, angle)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(head_dim)
        scores[:, np.triu_indices(len(x), 1)[0], np.triu_indices(len(x), 1)[1]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed: Floats = np.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
        return mixed


def _rotate(x: Floats, angle: Floats) -> Floats:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
