"""Final norm and projection to logits."""
