"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from onekernel.engine.prompt import encode
from onekernel.server.answering import answer
from onekernel.server.api_error import bad_request
from onekernel.server.body import read_body
from onekernel.server.completion_form import CompletionForm
from onekernel.server.fields import CompletionBody
from onekernel.server.grammar import response_grammar
from onekernel.server.run import Choice
from onekernel.server.sampling import sampling_params
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings


async def completions(request: Request) -> Response:
    """Continue one prompt or several, as one object or as a stream of events."""
    service: Service = request.app.state.service
    body = await read_body(request, CompletionBody, service.settings)
    engine, model = service.engine, service.model_named(body.model)
    params = sampling_params(
        body, engine.generation_config, service.settings, max_tokens=body.max_tokens, logprobs=body.logprobs
    )
    prompts = _prompts(body.prompt, len(params), service.settings)
    grammar = response_grammar(body.response_format, service.settings)

    def prepare() -> list[Choice]:
        choices = []
        for text in prompts:
            prompt = encode(engine.tokenizer, text, {}, engine.check_length)
            constraints: list[Any] = [None] * len(params)
            if grammar is not None:
                constraints = list(service.grammars.constraints(grammar, len(params), "response_format"))
            choices += [Choice(prompt, one, limit) for one, limit in zip(params, constraints, strict=True)]
        return choices

    choices = await asyncio.to_thread(prepare)
    return await answer(request, service, body, model, choices, CompletionForm())


def _prompts(prompt: str | list[Any], choices: int, settings: ServerSettings) -> list[str | list[int]]:
    """Return the prompts, each text or ids; raises ApiError if there are too many or of another kind."""
    several = isinstance(prompt, list) and not all(_is_id(part) for part in prompt)
    prompts: list[Any] = prompt if several and isinstance(prompt, list) else [prompt]
    if len(prompts) * choices > settings.max_choices:
        raise bad_request(
            f"there are {len(prompts)} prompts with n = {choices}; this server gives at most {settings.max_choices} "
            "choices in one request",
            "prompt",
            "batch_too_large",
        )
    for one in prompts:
        if not isinstance(one, str) and not (isinstance(one, list) and all(_is_id(part) for part in one)):
            raise bad_request("prompt must be a string, a list of token ids, or a list of these", "prompt")
        if not one:
            raise bad_request("the prompt is empty; give at least one token", "prompt")
    return prompts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
