"""Project the attention's output and add it to the residual."""
