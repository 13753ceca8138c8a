"""Find the neurons that fire, and add up what they give: a CTA's part of a sparse feed-forward."""
