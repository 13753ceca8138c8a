"""Project the feed-forward's inner values and add them to the residual."""
