"""Add up what the CTAs' neurons gave, and add it to the residual."""
