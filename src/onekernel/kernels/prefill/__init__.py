"""The kernels of prefill: a chunk of the prompt through all layers, straight from the packed weights."""
