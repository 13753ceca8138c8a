"""Merge the partial results of the members of a KV head: the second half of attention over a split cache."""
