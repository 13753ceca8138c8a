"""Normalise the residual and project it to raw queries, keys and values."""
