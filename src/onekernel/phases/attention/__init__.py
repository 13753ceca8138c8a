"""QK-norm, RoPE, append to the paged KV cache, attend."""
