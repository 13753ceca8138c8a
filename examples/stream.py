"""Print an answer while it is made, and stop at the end of its first sentence: python examples/stream.py MODEL"""

from __future__ import annotations

import sys

from onekernel import LLM, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)

question = {"role": "user", "content": "Why is the sky blue?"}
params = SamplingParams(temperature=0.7, seed=1, max_tokens=64)

with LLM(sys.argv[1]) as llm, llm.stream([question], params) as deltas:
    for delta in deltas:
        print(delta.text, end="", flush=True)
        if "." in delta.text:
            break  # leaving `with` cancels the rest of the answer
print()
