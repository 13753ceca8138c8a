"""Keep a conversation, with a system message: python examples/chat_messages.py MODEL"""

from __future__ import annotations

import sys

from onekernel import LLM, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)

messages = [{"role": "system", "content": "You answer in one short sentence."}]
params = SamplingParams(temperature=0, max_tokens=32)

with LLM(sys.argv[1]) as llm:
    for question in ("What is the largest planet?", "How many moons does it have?"):
        messages.append({"role": "user", "content": question})
        answer = llm.generate(messages, params)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"{question}\n  {answer.text}")
