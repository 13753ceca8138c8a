"""Find the neurons that fire, and what each of them comes to: the first half of a sparse feed-forward."""
