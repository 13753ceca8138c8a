"""A text to run a model on where none is given: prose, talk, figures and code, in a few hundred tokens."""

from __future__ import annotations

SAMPLE_TEXT = '''\
The lighthouse stood on the last rock before the open sea. Every evening at half past six the keeper climbed its one
hundred and forty-two steps, wiped the salt from the glass, and lit the lamp. "You will see them before you hear them,"
her father used to say about ships, and he had been right for thirty years; but in the winter of 1911 the fog came
first, and stayed for nine days.

How does a lens of glass rings throw light so far? Augustin Fresnel's answer was to keep only the part of a lens that
bends light, its curved surface, and to leave out the thick middle that does nothing but absorb. A lamp of the first
order weighs about 5,800 kg, is 2.6 m high, and is seen 20 to 30 km away in clear weather. What is left out is what
makes it possible to build one at all.

def visible_km(height_m: float, eye_m: float = 2.0) -> float:
    """Return how far away a light is seen over the curved sea, refraction included."""
    return 3.86 * (math.sqrt(height_m) + math.sqrt(eye_m))

Question: The lamp is 49 m above the sea and the sailor's eyes are 4 m above it. From how far away is the light seen?
Answer: The square roots are 7 and 2, their sum is 9, and 3.86 times 9 is 34.74. So the light is seen from 34.7 km.

On the tenth day the wind turned to the north-west and the fog was gone in an hour. Three ships lay at anchor in the
bay, closer together than anyone would have dared to bring them; their crews had steered by the bell alone.
'''
