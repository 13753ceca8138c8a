"""Kernels of ternary weights, and what is compiled in: shapes, their specs and how they are launched."""
