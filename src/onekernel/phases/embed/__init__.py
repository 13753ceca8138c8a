"""Look up the embedding of each token: the residual's first value."""
