"""The prefill kernels on the shim or a GPU: right beside float64, blind to poison, and the same bits however cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from onekernel.device.kernel import Arg, Kernel
from onekernel.device.shim_build import Build
from onekernel.errors import DeviceError
from onekernel.kernels.prefill import specs
from onekernel.kernels.prefill.variants import VARIANTS
from onekernel.phases.attention.cache import places
from onekernel.phases.attention.rope import rotate
from onekernel.phases.norm import rms_norm
from onekernel.weights.dense import PackedDense
from tests.megakernels import InFloat32, prompt_of
from tests.prefills import ATTENDED, ROUNDED, SUMS, Heads, InBf16, ProductCase, Whole, distance, poisoned
from tests.unit.plan.models import CONFIGS, random_weights

pytestmark = pytest.mark.usefixtures("host_compiler")

SLOW = pytest.mark.slow
BY_NAME = {variant.name: variant for variant in VARIANTS}
SMALL = (BY_NAME["16x16"],)
CPU = torch.device("cpu")

CASES = (
    ProductCase(1, 8, 64),
    ProductCase(17, 72, 200, bias=True),
    ProductCase(65, 44, 130, "add", bias=True),
    ProductCase(64, 76, 100, "silu"),
    ProductCase(20, 44, 192, "relu", bias=True),
    ProductCase(130, 24, 64, "relu2"),
)


def variants(*quick: tuple[str, int]) -> list[object]:
    """All variants with both tile rows; those not named are slow."""
    pairs = [(name, rows) for name in BY_NAME for rows in (8, 4)]
    return [pytest.param(*pair, marks=() if pair in quick else SLOW) for pair in pairs]


@pytest.mark.parametrize(("name", "tile_rows"), variants(("16x16", 8), ("64x32", 4), ("128x128", 8)))
def test_products(device, name: str, tile_rows: int) -> None:
    variant = BY_NAME[name]
    kernel = device.load(specs.product(variant, tile_rows))
    for case in CASES:
        found = case.run(kernel, variant, tile_rows, device.torch)
        limit = SUMS if case.result in ("store", "add") else ROUNDED
        assert distance(found, case.wanted(tile_rows)) < limit, case


@SLOW
def test_all_variants_give_the_same_bits_for_any_number_of_tokens(device) -> None:
    """What makes a prompt's bits independent of how it is cut."""
    whole = ProductCase(65, 80, 320)
    results = []
    for variant in VARIANTS:
        for tile_rows in (8, 4):
            kernel = device.load(specs.product(variant, tile_rows))
            results.append(whole.run(kernel, variant, tile_rows, device.torch))
    assert all(torch.equal(result, results[0]) for result in results)


@SLOW
@pytest.mark.parametrize("build", [Build.ADDRESS, Build.THREAD])
@pytest.mark.parametrize("tile_rows", [8, 4])
def test_products_under_sanitizers(shim, build: Build, tile_rows: int) -> None:
    """Every buffer has exactly its size: tokens, row tiles and columns that do not fill a CTA's tile are not read."""
    variant = BY_NAME["16x16"]
    kernel = shim(specs.product(variant, tile_rows), build=build, timeout_s=60.0)
    for case in (ProductCase(17, 20, 130, "add", bias=True), ProductCase(3, 12, 64, "silu")):
        limit = SUMS if case.result == "add" else ROUNDED
        assert distance(case.run(kernel, variant, tile_rows, CPU), case.wanted(tile_rows)) < limit


@SLOW
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    __syncthreads();  // this stage is there for all", "    // this stage is there for all"),
        ("async_copies_wait<PF_STAGES - 2>();", "async_copies_wait<PF_STAGES - 1>();"),
        ("min(token, tokens - 1)", "min(token, tokens)"),
        ("at % 2 * 256", "at % 2 * 512"),
        ("first += before.x;", "first += before.y;"),
        ("c[0] += add.x, c[1] += add.y, c[2] += add.x", "c[0] += add.x, c[1] += add.y, c[2] += add.y"),
    ],
)
def test_a_fault_in_the_product_is_seen(shim, with_fault, old: str, new: str) -> None:
    variant = BY_NAME["16x16"]
    spec = with_fault(specs.product(variant, 4), "prefill/product.cu", old, new)
    build = Build.ADDRESS if "token" in old else Build.PLAIN
    wrong = 0
    for seed in range(8):
        kernel = shim(spec, seed=seed, build=build)
        case = ProductCase(17, 40, 1200, "add", bias=True)
        try:
            wrong += not distance(case.run(kernel, variant, 4, CPU), case.wanted(4)) < SUMS
        except DeviceError:
            wrong += 1
    assert wrong


def heads(*quick: int) -> list[object]:
    sizes = (20, 64, 80, 96, 100, 128, 256)
    return [pytest.param(size, marks=() if size in quick else SLOW) for size in sizes]


@pytest.mark.parametrize("head_dim", heads(64, 100))
def test_attention(device, head_dim: int) -> None:
    """One token, tiles that are not full, grouped heads, and a chunk that begins inside a page."""
    kernel = device.load(specs.attention(head_dim))
    for case in (
        Heads(head_dim, 2, 2, 0, 1),
        Heads(head_dim, 4, 2, 70, 65),
        Heads(head_dim, 3, 1, 63, 17),
        Heads(head_dim, 2, 1, 0, 130),
    ):
        found, wanted = case.attend(kernel, device.torch)
        assert distance(found, wanted) < ATTENDED, case


@SLOW
@pytest.mark.parametrize("head_dim", [20, 64])
def test_attention_under_sanitizers(shim, head_dim: int) -> None:
    kernel = shim(specs.attention(head_dim), build=Build.ADDRESS, timeout_s=60.0)
    found, wanted = Heads(head_dim, 4, 2, 70, 17).attend(kernel, CPU)
    assert distance(found, wanted) < ATTENDED


@SLOW
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("from + row * from_stride + at * 8, row < rows", "from + row * from_stride + at * 8, true"),
        ("> query + i / 2 * 8", "> query + 8"),
        ("    __syncthreads();  // all have left the page's place\n", ""),
        ("out[n][half * 2] *= shrink;", "out[n][half * 2] *= 1.0f;"),
    ],
)
def test_a_fault_in_attention_is_seen(shim, with_fault, old: str, new: str) -> None:
    spec = with_fault(specs.attention(64), "prefill/attention.cu", old, new)
    wrong = 0
    for seed in range(6):
        found, wanted = Heads(64, 2, 1, 100, 70).attend(shim(spec, seed=seed), CPU)
        wrong += not distance(found, wanted) < ATTENDED
    assert wrong


def append(kernel: Kernel, case: Heads, qk_norm: bool, device: torch.device) -> tuple[list[torch.Tensor], ...]:
    """Return queries, keys and values as append.cu leaves them, and as float64 makes them."""
    generator = torch.Generator().manual_seed(case.head_dim)
    tokens, start, dim = case.tokens, case.start, case.head_dim
    total = case.heads + 2 * case.kv_heads
    qkv = poisoned(tokens + 3, total * dim + 4)
    raw = torch.randn(tokens, total, dim, generator=generator)
    qkv[:tokens, : total * dim] = raw.view(tokens, -1)
    end = start + tokens
    angles = torch.randn(end, dim // 2, generator=generator)
    weights = torch.rand(2, dim, generator=generator) + 0.5
    rope = torch.stack((angles.cos(), angles.sin()), -1)
    constants = torch.cat((weights.reshape(-1), rope.reshape(-1))).to(device)
    table = case.table
    pages = poisoned(len(table) + 2, case.kv_heads, 2, 64, dim, dtype=torch.bfloat16).to(device)
    queries = poisoned(tokens + 3, case.heads, dim, dtype=torch.bfloat16).to(device)
    args: list[Arg] = [
        qkv.to(device),
        qkv.shape[1],
        tokens,
        start,
        case.heads,
        case.kv_heads,
        constants,
        2 * dim,
        0,
        dim,
        1e-5,
        table.to(device),
        pages,
        queries,
    ]
    kernel.launch(-(-tokens * total // specs.APPEND_VECTORS), specs.APPEND_THREADS, args)
    pages, queries = pages.cpu(), queries.cpu()
    q, k, v = raw.double().split((case.heads, case.kv_heads, case.kv_heads), dim=1)
    if qk_norm:
        q, k = (rms_norm(x, w.double(), 1e-5) for x, w in zip((q, k), weights, strict=True))
    cos, sin = angles[start:].double().cos(), angles[start:].double().sin()
    stored = torch.stack([pages[table[p // 64], :, :, p % 64][..., places(dim)[p % 64]] for p in range(start, end)])
    for position in range(start, end):
        pages[table[position // 64], :, :, position % 64] = torch.nan
    assert pages.isnan().all()
    assert queries[tokens:].isnan().all()
    return [queries[:tokens], stored[:, :, 0], stored[:, :, 1]], [rotate(q, cos, sin), rotate(k, cos, sin), v]


@pytest.mark.parametrize(
    ("head_dim", "qk_norm"),
    [(64, True), (100, False), *(pytest.param(*case, marks=SLOW) for case in ((20, True), (80, False), (256, True)))],
)
def test_append(device, head_dim: int, qk_norm: bool) -> None:
    kernel = device.load(specs.append(head_dim, qk_norm))
    for case in (Heads(head_dim, 4, 2, 60, 9), Heads(head_dim, 3, 1, 0, 1)):
        for found, wanted in zip(*append(kernel, case, qk_norm, device.torch), strict=True):
            assert distance(found, wanted) < ROUNDED


@SLOW
def test_append_under_sanitizers(shim) -> None:
    kernel = shim(specs.append(20, True), build=Build.ADDRESS, timeout_s=60.0)
    for found, wanted in zip(*append(kernel, Heads(20, 3, 1, 60, 9), True, CPU), strict=True):
        assert distance(found, wanted) < ROUNDED


@pytest.mark.parametrize("build", [Build.PLAIN, pytest.param(Build.ADDRESS, marks=SLOW)])
@pytest.mark.parametrize("hidden", [64, 102, 1100])
def test_norm(shim, build: Build, hidden: int) -> None:
    columns, out_columns = -(-hidden // 8) * 8, -(-hidden // 64) * 64
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, hidden, generator=generator), torch.rand(hidden, generator=generator) + 0.5
    residual, constants = poisoned(4, columns), poisoned(4 + out_columns)
    residual[:2] = F.pad(x, (0, columns - hidden))
    constants[4:] = F.pad(weight, (0, out_columns - hidden))
    out = poisoned(4, out_columns, dtype=torch.bfloat16)
    args = [residual, columns, hidden, constants, 4, 1e-5, out, out_columns]
    shim(specs.NORM, build=build).launch(2, specs.NORM_THREADS, args, shared_bytes=specs.NORM_SHARED_BYTES)
    assert distance(out[:2, :hidden], rms_norm(x.double(), weight.double(), 1e-5)) < ROUNDED
    assert (out[:2, hidden:] == 0).all()
    assert out[2:].isnan().all()


@pytest.mark.parametrize("build", [Build.PLAIN, pytest.param(Build.ADDRESS, marks=SLOW)])
@pytest.mark.parametrize("tile_rows", [0, 4, 8])
def test_embed(shim, build: Build, tile_rows: int) -> None:
    vocab, hidden, columns = 21, 102, 104
    table = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = PackedDense.pack(table, tile_rows) if tile_rows else None
    values = table if packed is None else packed.tiles
    arena = torch.cat((torch.full((16,), 0xFF, dtype=torch.uint8), values.reshape(-1).view(torch.uint8)))
    ids, residual = torch.tensor([20, 0, 7, 7], dtype=torch.int32), poisoned(5, columns)
    units = 0 if packed is None else packed.tiles.shape[1]
    shim(specs.EMBED, build=build).launch(
        4, specs.EMBED_THREADS, [ids, arena, 16, tile_rows, units, hidden, residual, columns]
    )
    assert torch.equal(residual[:4, :hidden], table[ids.long()].float())
    assert (residual[:4, hidden:] == 0).all()
    assert residual[4].isnan().all()


@pytest.mark.parametrize(
    ("name", "tokens", "cuts"),
    [
        ("bias", 40, (17, 18)),
        *(
            pytest.param(name, 70, (17, 18, 66), marks=SLOW)
            for name in ("llama3-rope", "tied", "qwen3", "head100", "odd", "head256")
        ),
    ],
)
def test_whole_prefill(shim, name: str, tokens: int, cuts: tuple[int, ...]) -> None:
    """As close to float32 as the references in bf16, and the same bits cut elsewhere and from tiles of four rows."""
    config = CONFIGS[name]
    weights = random_weights(config)
    whole, ids = Whole.of(config, weights), prompt_of(config, tokens)
    found = whole.filled(whole.prefill(shim, SMALL), ids)
    other = Whole.of(config, weights, tile_rows=4)
    assert torch.equal(other.filled(other.prefill(shim, SMALL), ids, cuts), found)
    exact, theirs = whole.reference(InFloat32(weights), ids), whole.reference(InBf16(weights), ids)
    for layer in range(config.num_hidden_layers):
        ours = distance(found[layer], exact[layer])
        assert ours <= 1.1 * distance(theirs[layer], exact[layer]), f"layer {layer}: {ours}"


@SLOW
def test_whole_prefill_in_another_variant(shim) -> None:
    """Wide tiles, in which most of the rows are none of the model's."""
    config = CONFIGS["odd"]
    whole, ids = Whole.of(config, random_weights(config)), prompt_of(config, 70)
    found = [whole.filled(whole.prefill(shim, (variant,)), ids) for variant in (BY_NAME["16x16"], BY_NAME["128x256"])]
    assert torch.equal(*found)
