"""Benchmarks and perplexity."""
