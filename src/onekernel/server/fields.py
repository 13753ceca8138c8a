"""The members of request bodies that are known: their types, what may be ignored, and what is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec

IGNORED = frozenset(
    {
        "cache_prompt",
        "chat_id",
        "id_slot",
        "keep_alive",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "timings_per_token",
        "user",
        "verbosity",
    }
)
"""Members that do not change the text of an answer here; they are accepted in silence."""

_NOTHING: tuple[Any, ...] = (None,)
_ONE_WAY = "leave it out"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "suffix": ((None, ""), "text is only generated after a prompt, not into a gap"),
    "echo": ((None, False), "join the prompt and the answer yourself"),
    "best_of": ((None, 1), "use n and pick one yourself"),
    "audio": (_NOTHING, "answers are text"),
    "modalities": ((None, ["text"]), "answers are text"),
    "prediction": (_NOTHING, _ONE_WAY),
    "web_search_options": (_NOTHING, _ONE_WAY),
    "functions": ((None, []), "use tools"),
    "function_call": ((None, "none"), "use tool_choice"),
    "prompt_logprobs": ((None, 0), "only the answer's tokens have logprobs"),
    "use_beam_search": ((None, False), _ONE_WAY),
    "length_penalty": ((None, 1, 0), _ONE_WAY),
    "min_tokens": ((None, 0), "use ignore_eos with max_tokens for a fixed length"),
    "guided_json": (_NOTHING, "use response_format with a json_schema"),
    "guided_regex": (_NOTHING, "use response_format with a json_schema"),
    "guided_choice": (_NOTHING, "use response_format with a json_schema that has an enum"),
    "guided_grammar": (_NOTHING, "use response_format with a json_schema"),
    "structured_outputs": (_NOTHING, "use response_format with a json_schema"),
    "grammar": ((None, ""), "use response_format with a json_schema"),
    "json_schema": (_NOTHING, "use response_format with a json_schema"),
    "typical_p": ((None, 1), _ONE_WAY),
    "tfs_z": ((None, 1), _ONE_WAY),
    "mirostat": ((None, 0), _ONE_WAY),
    "dry_multiplier": ((None, 0), _ONE_WAY),
    "xtc_probability": ((None, 0), _ONE_WAY),
    "dynatemp_range": ((None, 0), _ONE_WAY),
    "top_n_sigma": ((None, -1, 0), _ONE_WAY),
    "n_predict": (_NOTHING, "use max_tokens"),
    "repeat_penalty": ((None, 1), "use repetition_penalty"),
    "add_generation_prompt": ((None, True), "use chat_template_kwargs"),
    "continue_final_message": ((None, False), "use /v1/completions to continue a text"),
    "chat_template": (_NOTHING, "the model's own template is used; its variables go in chat_template_kwargs"),
    "documents": ((None, []), "use chat_template_kwargs"),
    "images": ((None, []), "this model reads text"),
    "input": (_NOTHING, "use messages, or prompt on /v1/completions"),
}
"""Members that would change the answer and are not built in: the values that mean nothing, and what to do instead."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream also holds."""

    include_usage: bool | None = None


class Body(msgspec.Struct, kw_only=True):
    """Any JSON body."""

    model: str | None = None


class Generation(Body, kw_only=True):
    """What chat and plain completions have in common. None: not given."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    response_format: dict[str, Any] | None = None


class ChatBody(Generation, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


class CompletionBody(Generation, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | list[Any]
    logprobs: int | None = None


class TokenizeBody(Body, kw_only=True):
    """The body of /tokenize: text, as llama.cpp (`content`) or vLLM (`prompt`) name it, or messages."""

    content: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body, kw_only=True):
    """The body of /detokenize."""

    tokens: list[int]
