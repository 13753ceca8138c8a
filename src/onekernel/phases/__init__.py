"""One folder a phase of the decode step; each has a plain PyTorch reference."""
