"""Show how sure the model is of each token, and what else it considered: python examples/logprobs.py MODEL"""

from __future__ import annotations

import math
import sys

from onekernel import LLM, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)

with LLM(sys.argv[1]) as llm:
    answer = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=6, logprobs=3))

for token in answer.logprobs or ():
    others = ", ".join(f"{top.text!r} {math.exp(top.logprob):.1%}" for top in token.top if top.text != token.text)
    print(f"{token.text!r:12} {math.exp(token.logprob):6.1%}   instead of {others}")
