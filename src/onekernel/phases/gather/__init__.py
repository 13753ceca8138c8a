"""Add up the down rows of the neurons that fire, and add that to the residual."""
