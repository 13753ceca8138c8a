"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from onekernel.engine.prompt import Encoded, encode
from onekernel.engine.request import Constraint
from onekernel.server.answering import answer
from onekernel.server.api_error import bad_request
from onekernel.server.body import read_body
from onekernel.server.chat_form import ChatForm
from onekernel.server.fields import ChatBody
from onekernel.server.grammar import AfterThinking, response_grammar
from onekernel.server.messages import template_messages, template_options
from onekernel.server.run import Choice
from onekernel.server.sampling import sampling_params
from onekernel.server.service import Service
from onekernel.server.tools import Tools, read_tools, with_tools


async def chat_completions(request: Request) -> Response:
    """Answer a chat, as one object or as a stream of events."""
    service: Service = request.app.state.service
    body = await read_body(request, ChatBody, service.settings)
    engine, model = service.engine, service.model_named(body.model)
    params = sampling_params(
        body,
        engine.generation_config,
        service.settings,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=_logprobs(body),
    )
    tools = read_tools(body, service.settings)
    messages = template_messages(body.messages, service.settings)
    template = template_options(body.chat_template_kwargs, body.reasoning_effort)
    with_tools(messages, template, tools, engine.tokenizer)

    def prepare() -> list[Choice]:
        prompt = encode(engine.tokenizer, messages, template, engine.check_length)
        constraints = _constraints(service, body, tools, prompt, len(params))
        return [Choice(prompt, one, constraint) for one, constraint in zip(params, constraints, strict=True)]

    choices = await asyncio.to_thread(prepare)
    form = ChatForm(None if tools is None else tools.reader)
    return await answer(request, service, body, model, choices, form)


def _logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _constraints(
    service: Service, body: ChatBody, tools: Tools | None, prompt: Encoded, count: int
) -> Sequence[Constraint | None]:
    """Return a constraint for each choice: of a demanded call, or of the response_format."""
    tokenizer = service.engine.tokenizer
    grammar, param = response_grammar(body.response_format, service.settings), "response_format"
    if tools is not None and tools.demanded:
        if grammar is not None:
            raise bad_request("a demanded tool call and a response_format exclude each other", "response_format")
        grammar, param = tools.grammar(tokenizer), "tools"
    if grammar is None:
        return [None] * count
    made = service.grammars.constraints(grammar, count, param)
    if prompt.splitter is not None and prompt.splitter.inside:
        return [AfterThinking(one, tokenizer, prompt.splitter.close_tag) for one in made]
    return made
