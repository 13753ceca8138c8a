"""Files of a model -> named tensors, and packed layouts. No CUDA."""
