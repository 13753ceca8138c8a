"""How large the KV cache of all sequences together is: chosen once, before anything is allocated."""

from __future__ import annotations

from dataclasses import replace

from onekernel.config import PAGE_TOKENS
from onekernel.engine.memory import pages_for
from onekernel.errors import ConfigError
from onekernel.plan.plan import Plan

DEFAULT_CONTEXTS = 4
"""Sequences of full length that fit the cache when nothing is asked for; shorter ones are as many more."""


def kv_pages(asked_tokens: int | None, context: int, page_bytes: int, spare_bytes: int) -> int:
    """Return the pages of the KV cache, at least those of one context.

    asked_tokens: None for DEFAULT_CONTEXTS contexts, or what fits half of `spare_bytes`, which is free memory beyond
    the weights, the workspace and one context; 0 for one context. Raises ConfigError for less than one context.
    """
    one = pages_for(context)
    if asked_tokens is None:
        return min(DEFAULT_CONTEXTS * one, one + max(0, spare_bytes // 2) // page_bytes)
    if 0 < asked_tokens < context:
        raise ConfigError(
            f"kv_tokens is {asked_tokens}, less than one context of {context} tokens: give at least {context}, or a "
            f"smaller --ctx-size"
        )
    return pages_for(asked_tokens) if asked_tokens else one


def describe(pages: int, context: int) -> str:
    """Return what that is in tokens and in sequences, in brackets; nothing for one context."""
    one = pages_for(context)
    return "" if pages == one else f" ({pages * PAGE_TOKENS} tokens, {pages / one:.3g} contexts)"


def with_pages(plan: Plan, pages: int) -> Plan:
    """Return the plan for a KV cache of that many pages; nothing else in it depends on them."""
    header = plan.header.copy()
    header["num_pages"] = pages
    return replace(plan, header=header, limits=replace(plan.limits, num_pages=pages))
