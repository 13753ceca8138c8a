"""Normalise the residual, project it to gate and up, and multiply the activated gate by up."""
