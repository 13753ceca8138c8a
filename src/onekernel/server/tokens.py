"""POST /tokenize and /detokenize, with the members of llama.cpp's and vLLM's servers."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from onekernel.server.api_error import bad_request
from onekernel.server.body import read_body
from onekernel.server.fields import DetokenizeBody, TokenizeBody
from onekernel.server.json_response import JsonResponse
from onekernel.server.messages import template_messages, template_options
from onekernel.server.service import Service


async def tokenize(request: Request) -> Response:
    """Return the ids of a text (a BOS before it unless refused) or of messages.

    One that cannot fit the context, told from its bytes as for a prompt, is refused before it is encoded; one that is
    only somewhat longer is counted.
    """
    service: Service = request.app.state.service
    body = await read_body(request, TokenizeBody, service.settings)
    engine = service.engine
    service.model_named(body.model)
    text = body.content if body.prompt is None else body.prompt
    if (text is None) == (body.messages is None):
        raise bad_request("give either content (or prompt) or messages", "content")

    def encode() -> list[int]:
        tokenizer, check = engine.tokenizer, engine.check_length
        if body.messages is not None:
            messages = template_messages(body.messages, service.settings)
            options = template_options(body.chat_template_kwargs, None)
            return tokenizer.encode_chat(messages, check_length=check, **options)
        special = body.add_special if body.add_special_tokens is None else body.add_special_tokens
        if special is False or body.parse_special is False:
            return tokenizer.encode(
                text or "",
                add_special_tokens=special is not False,
                parse_special=body.parse_special is not False,
                check_length=check,
            )
        return tokenizer.encode_prompt(text or "", check_length=check)

    def answer() -> JsonResponse:
        ids = encode()
        pieces = [{"id": i, "piece": engine.tokenizer.token_text(i)} for i in ids] if body.with_pieces else ids
        return JsonResponse({"tokens": pieces, "count": len(ids), "max_model_len": engine.backend.max_context})

    return await asyncio.to_thread(answer)


async def detokenize(request: Request) -> Response:
    """Return the text of ids."""
    service: Service = request.app.state.service
    body = await read_body(request, DetokenizeBody, service.settings)
    engine = service.engine
    service.model_named(body.model)

    def answer() -> JsonResponse:
        limit = engine.tokenizer.vocab_limit
        wrong = next((i for i in body.tokens if not 0 <= i < limit), None)
        if wrong is not None:
            raise bad_request(f"tokens holds {wrong}; this model's ids are 0 to {limit - 1}", "tokens")
        text = engine.tokenizer.decode(body.tokens, skip_special=False, continues=True)
        return JsonResponse({"content": text, "prompt": text})

    return await asyncio.to_thread(answer)
