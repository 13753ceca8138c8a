"""Training of activation-sparse models: a recipe (settings), a run with its checkpoints, and the model it leaves."""
