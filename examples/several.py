"""Ask several questions from asyncio; the engine answers them in turn: python examples/several.py MODEL"""

from __future__ import annotations

import asyncio
import sys

from onekernel import AsyncLLM, SamplingParams

if len(sys.argv) != 2:
    sys.exit(__doc__)

QUESTIONS = ("What is the capital of Italy?", "What is the capital of Spain?")


async def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    async with await AsyncLLM.load(sys.argv[1]) as llm:
        answers = await asyncio.gather(
            *(llm.generate([{"role": "user", "content": question}], params) for question in QUESTIONS)
        )
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(question, answer.text)


asyncio.run(main())
