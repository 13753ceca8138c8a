"""A decode step as data: phases split over CTAs, buffers, dependencies; checked and run on the CPU. Pure Python."""
