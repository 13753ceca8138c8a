"""How the cache of one KV head is shared out: the one rule that plan, interpreter and kernel follow.

A block of `block_pages` pages belongs to one member for ever, which appends to it and reads it: keys written by one CTA
and copied by another would need an ordering that tagged words do not give. `KvSplit` in `tile/machine.cuh` follows it.
"""

from __future__ import annotations

from onekernel.config import PAGE_TOKENS

ALONE_PIECES = 8
"""Pieces of the cache that one member goes through before it pays to share them out: combine is a hand-over more."""
_ANSWER_TOKENS = 64
"""What is taken to follow a prompt when that is decided."""
_ROW_PAGES = 4
"""Of a block where members have many pages."""
KEYS_AND_VALUES_BYTES = 2 * 2
"""Of one token and one of a head's dimensions: a bf16 key and a bf16 value."""


def members_of(ctas: int, kv_heads: int) -> int:
    """Return how many CTAs share a KV head."""
    return max(1, ctas // kv_heads)


def piece_tokens(head_dim: int, stage_bytes: int) -> int:
    """Return the tokens whose keys and values are in one stage of the ring; `piece_tokens` in phases/attention."""
    tokens = PAGE_TOKENS
    while tokens * head_dim * KEYS_AND_VALUES_BYTES > stage_bytes:
        tokens //= 2
    return tokens


def block_pages_after(prompt_tokens: int, piece: int, members: int) -> int:
    """Return the pages of a block for an answer to so many tokens, for all of its launches; `piece`: of `piece_tokens`.

    A short prompt has one member for as long as that is fastest. A longer one has all of them, in blocks of a page,
    which share it out most evenly; of many pages, each a piece, four in a row are faster. The prompt alone decides:
    bits depend on how the cache is shared out, and must not depend on what else the engine does.
    """
    alone = ALONE_PIECES * piece // PAGE_TOKENS
    if prompt_tokens + _ANSWER_TOKENS < alone * PAGE_TOKENS:
        return alone
    return _ROW_PAGES if piece == PAGE_TOKENS and prompt_tokens >= _ROW_PAGES * members * PAGE_TOKENS else 1


def blocks(length: int, block_pages: int) -> int:
    """Return how many blocks `length` tokens begin."""
    return -(-length // (PAGE_TOKENS * block_pages))


def chunks(length: int, members: int, block_pages: int) -> int:
    """Return how many members attend to `length` tokens, the new one among them: members 0 to chunks - 1."""
    return min(members, blocks(length, block_pages))


def most_tokens(length: int, members: int, block_pages: int) -> int:
    """Return the tokens of the member that attends to the most of `length`."""
    block = PAGE_TOKENS * block_pages
    rounds, rest = divmod(length, members * block)
    return rounds * block + min(rest, block)


def owner(block: int, members: int) -> int:
    """Return the member that a block belongs to; a block's number tells it, whatever the length."""
    return block % members


def slices(pairs: int, members: int) -> list[int]:
    """Return members + 1 bounds: member m merges pairs of values bounds[m] to bounds[m + 1] of its KV head."""
    return [pairs * member // members for member in range(members + 1)]
