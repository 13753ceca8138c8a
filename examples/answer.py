"""Ask a question and get the whole answer: python examples/answer.py MODEL"""

from __future__ import annotations

import sys

from onekernel import LLM, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)

with LLM(sys.argv[1]) as llm:
    question = {"role": "user", "content": "Name three primary colours."}
    answer = llm.generate([question], SamplingParams(temperature=0, max_tokens=48))

print(answer.text)
print(
    f"{answer.usage.completion_tokens} tokens ({answer.finish_reason}), "
    f"first after {answer.timings.ttft_ms:.0f} ms, then {answer.timings.decode_tokens_per_s:.1f} per second"
)
