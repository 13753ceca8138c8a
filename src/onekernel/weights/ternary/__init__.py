"""Ternary weights: the numbers, the layouts that kernels read, and the files they come from."""
