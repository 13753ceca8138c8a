"""Architectures: config.json -> ModelConfig, tensor names, the model as a list of phases."""
