"""The only place that imports cuda.*: compile, cache, load, launch, device facts. Knows no model."""
