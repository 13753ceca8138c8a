"""Matrix-vector kernels of ternary weights: decode.cu and blocks.cu, for one to eight tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onekernel.device.spec import KernelSpec, Param, Pointer, Scalar

UNIT_BYTES = 512
UNIT_COLUMNS = 128
STRIP_ROWS = 16
MAX_TOKENS = 8
MAX_WARPS = 32
MAX_BARRIERS = 15
"""Of a CTA, beside that of all its threads: one for each strip that several warps share."""

SHARED_BYTES = 99 * 1024
"""What a CTA may have on every architecture the kernels are for: the least of them."""

PARAMS = (
    Pointer("codes", "uint8", ("strips", "strip_bytes")),
    Pointer("scales", "float32", ("scale_values",)),
    Pointer("x", "int8", ("tokens", "columns")),
    Pointer("inverse", "float32", ("tokens",), align_bytes=4),
)
"""What every product of ternary weights starts with; then the result of its own dtype, and `SIZES`."""

SIZES = (Scalar("strip_bytes", "u32"), Scalar("rows", "u32"), Scalar("tokens", "u32"), Scalar("columns", "u32"))


def result(bf16: bool) -> Pointer:
    """Return the parameter that takes the result."""
    return Pointer("out", "bfloat16" if bf16 else "float32", ("tokens", "rows"), align_bytes=2 if bf16 else 4)


def many_params(bf16: bool, ordered: bool = False) -> tuple[Param, ...]:
    """Return the parameters of a product of many tokens; `room` is at least `tokens`.

    `ordered`: x in the order of the codes, whole units of columns, and the sum of each token's.

    `result` is one of prefill's `RESULTS`: rows as they are, in either dtype; added to `out` or gated, in float32.
    Gated results are half as wide as the matrix has rows.
    """
    return (
        *PARAMS[:2],
        Pointer("x", "int8", ("room", "columns")),
        Pointer("inverse", "float32", ("room",), align_bytes=4),
        *((Pointer("x_sums", "int32", ("room",), align_bytes=4),) if ordered else ()),
        Pointer("out", "bfloat16" if bf16 else "float32", ("room", "width"), align_bytes=2 if bf16 else 4),
        *SIZES,
        Scalar("result", "u32"),
    )


_ENTRIES = {
    "tensor_core": ("ternary/decode.cu", "ternary_decode"),
    "blocks16x32": ("ternary/blocks.cu", "ternary_blocks"),
}


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What a build depends on. `split` warps share a strip of 16 rows; each has a ring of `stages` units."""

    layout: str
    tokens: int
    group: int = 0
    bf16: bool = False
    warps: int = 8
    split: int = 8
    stages: int = 6

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * 32

    def shared_bytes(self, units: int) -> int:
        """Return what a CTA takes: rings, and for each row and token a sum of each warp, or a term of each group."""
        groups = UNIT_COLUMNS // self.group if self.group else 0
        stage_bytes = UNIT_BYTES + self.tokens * UNIT_COLUMNS + groups * STRIP_ROWS * 4
        parts = self.warps // self.split * units * groups if groups else self.warps
        return self.warps * self.stages * stage_bytes + parts * self.tokens * STRIP_ROWS * 4

    def grid(self, strips: int, tokens: int) -> int:
        """Return how many CTAs multiply a matrix of that many strips with up to `self.tokens` tokens."""
        return -(-strips // (self.warps // self.split))

    def spec(self) -> KernelSpec:
        """Return the kernel for this shape."""
        file, entry = _ENTRIES[self.layout]
        return KernelSpec(
            file=file,
            entry=entry,
            constants={
                "TERNARY_TOKENS": self.tokens,
                "TERNARY_GROUP": self.group,
                "TERNARY_BF16": int(self.bf16),
                "TERNARY_WARPS": self.warps,
                "TERNARY_SPLIT": self.split,
                "TERNARY_STAGES": self.stages,
            },
            params=(*PARAMS, result(self.bf16), *SIZES),
        )


def choose_product(
    layout: str, strips: int, units: int, tokens: int, *, group: int = 0, bf16: bool = False, sms: int = 132
) -> ProductShape:
    """Return the shape for a matrix of `strips` strips of `units` units, and up to eight tokens.

    A strip is split over as many warps as give every SM about 16 of them: enough loads on their way to fill the
    memory's latency, and no second wave of CTAs.
    """
    wanted = 16 * sms / strips
    split = 8 if group else next((n for n in (1, 2, 4) if n >= wanted), 8)
    if layout == "tensor_core" and not group:
        return replace(_even(strips, units, tokens, split, sms), bf16=bf16)
    shape = replace(_shape(layout, units, tokens, warps=8, split=split), group=group, bf16=bf16)
    while shape.shared_bytes(units) > SHARED_BYTES and shape.tokens > 1:
        shape = replace(shape, tokens=shape.tokens // 2)  # the terms of many groups; the matrix is then read again
    return shape


def variants(layout: str, strips: int, units: int, tokens: int, *, bf16: bool = False) -> list[ProductShape]:
    """Return the chosen shape and others near it, for a benchmark to find out which is fastest."""
    chosen = choose_product(layout, strips, units, tokens, bf16=bf16)
    ways = [(8, chosen.split // 2), (8, chosen.split * 2), (4, min(chosen.split, 4)), (16, 16), (16, chosen.split)]
    found = [chosen, replace(chosen, stages=max(2, chosen.stages - 1)), replace(chosen, stages=chosen.stages + 1)]
    for warps, split in ways:
        if 1 <= split <= min(warps, units):
            found.append(replace(_shape(layout, units, tokens, warps, split), bf16=bf16))
    found = list(dict.fromkeys(found))
    return [shape for shape in found if shape.shared_bytes(units) <= SHARED_BYTES]


def _even(strips: int, units: int, tokens: int, split: int, sms: int) -> ProductShape:
    """Return the shape in which every SM has as many strips, all in one CTA if there is room: what starts is one wave.

    A ring is short: what it copies ahead is on its way before the first sum, and two or three units of each warp fill
    the memory's latency (measured on an H200 in eight matrices; each more takes 0.1 to 0.3 us).
    """
    held = _held(tokens)
    stages = 3 if units <= 5 * split else 4
    on_sm = -(-strips // sms)
    shape = ProductShape("tensor_core", held, warps=split, split=split, stages=stages)
    if on_sm <= 2:
        return replace(shape, warps=8)
    for ctas in range(1, on_sm + 1):
        found = replace(shape, warps=-(-on_sm // ctas) * split)
        barriers = 0 if split == 1 else found.warps // split
        if found.warps <= MAX_WARPS and barriers <= MAX_BARRIERS and found.shared_bytes(units) <= SHARED_BYTES:
            return found
    return shape


def _held(tokens: int) -> int:
    return next(n for n in (1, 2, 4, 8) if n >= tokens)


def _shape(layout: str, units: int, tokens: int, warps: int, split: int) -> ProductShape:
    held = _held(tokens)
    most = {1: 8, 2: 8, 4: 6, 8: 4}[held]  # stages: about 40 KB of rings for eight warps
    stages = max(2, min(-(-units // split) + 1, most))
    return ProductShape(layout, held, warps=warps, split=split, stages=stages)
