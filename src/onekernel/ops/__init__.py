"""Kernels as PyTorch operators, with fake and CPU implementations, and modules on top."""
