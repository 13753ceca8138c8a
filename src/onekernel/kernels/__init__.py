"""CUDA sources as package data, and the list of them. Framework-free device code; no host code."""
