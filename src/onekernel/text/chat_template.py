"""Chat templates: a model's own Jinja program that turns messages into one prompt string.

Rendered as `transformers` (5.x) renders them, so that a model sees the text it was trained on: the immutable sandbox
of jinja2 with trim_blocks and lstrip_blocks, break and continue, `{% generation %}`, `tojson` without HTML escaping,
`raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from onekernel.errors import TemplateError


class ChatTemplate:
    """The chat template of a model: one Jinja source, or several by name (`default`, `tool_use`, ...).

    A source is compiled when it is first used: a model whose template is broken still completes plain text.
    """

    def __init__(self, sources: str | Mapping[str, str]) -> None:
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **context: Any,
    ) -> str:
        """Return the prompt for `messages`; `context` holds bos_token and so on, and what the template itself knows.

        Of several named templates, `tool_use` is taken when there are tools, else `default`. Raises TemplateError for
        no messages, with the template's own words if it refuses them, and with the cause if it does not parse or fails.
        """
        if not messages:
            raise TemplateError("there are no messages; give at least one with a role and a content")
        source = self._source(tools is not None)
        try:
            return _compile(source).render(
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **context,
            )
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the model's chat template does not parse: line {error.lineno}: {error.message}; fetch it again"
            ) from error
        except _Refused as refusal:
            raise TemplateError(f"the model's chat template refused the messages: {refusal}") from refusal
        except Exception as error:  # a template is the model author's program: it can fail in any way
            raise TemplateError(
                f"the model's chat template failed on these messages ({type(error).__name__}: {error}); check that "
                "each has a role and a content as the template expects"
            ) from error

    def _source(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self.sources:
            return self.sources["tool_use"]
        if "default" not in self.sources:
            raise TemplateError(
                f"the model has chat templates named {', '.join(sorted(self.sources))} but none named 'default'; "
                "save the one to use as chat_template.jinja in the model's directory"
            )
        return self.sources["default"]


class _Refused(jinja2.TemplateError):
    """What `raise_exception` in a template raises; the message is the template's own."""


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here its body is just rendered, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    @staticmethod
    def _render(caller: Callable[[], str]) -> str:
        return caller()


@lru_cache(maxsize=16)
def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes <, > and &, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
