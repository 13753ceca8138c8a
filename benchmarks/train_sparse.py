"""Train a gated-ReLU Llama for a few minutes with an L1 penalty: where the pattern `real` of sparse.py comes from.

    python benchmarks/train_sparse.py --seconds 180 --out real.pt     on one GPU; also results/sparse_training.json
    python benchmarks/train_sparse.py --tiny --out /tmp/real.pt       the same code on a CPU in seconds

The recipe is that of arXiv 2603.23198, shortened: AdamW, learning rate 1e-3 after 100 steps, clip 1, bf16 autocast, the
penalty as the published code has it (sum over neurons, mean over tokens and layers). The text is what Python installs
bring: their own sources. `real.pt` holds one layer's weights and inputs, `--mask` its activity, a bit a value.
"""

from __future__ import annotations

import argparse
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.sparse_llama import ReluFFN, Sizes, SparseLlama
from onekernel.measure.results import write_results
from onekernel.weights.twell import TwellStatistics


@dataclass(frozen=True, slots=True)
class Recipe:
    sizes: Sizes
    l1: float
    batch: int
    seconds: float
    most_steps: int
    text_bytes: int
    warm_up: int = 100
    kept_tokens: int = 16384
    mask_tokens: int = 4096


GPU = Recipe(Sizes(layers=4, vocab=16384, context=1024), 2e-5, 32, 180.0, 100_000, 120_000_000)
TINY = Recipe(
    Sizes(layers=2, hidden=64, inner=96, heads=4, vocab=400, context=32), 2e-5, 4, 30.0, 3, 200_000, 2, 64, 32
)


def texts(most_bytes: int) -> Iterator[str]:
    """Yield Python sources of this installation, in an order that is the same every time, up to so many bytes."""
    folders = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
    paths = sorted({path for folder in folders for path in folder.rglob("*.py")})
    random.Random(0).shuffle(paths)
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield text
        most_bytes -= len(text)
        if most_bytes < 0:
            return


def token_ids(recipe: Recipe) -> torch.Tensor:
    """Train a byte-level BPE on a part of the text and return all of it as ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=recipe.sizes.vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(min(recipe.text_bytes, 20_000_000)), trainer)
    encoded = tokenizer.encode_batch_fast(list(texts(recipe.text_bytes)), add_special_tokens=False)
    return torch.cat([torch.tensor(one.ids, dtype=torch.int32) for one in encoded])


def batches(ids: torch.Tensor, recipe: Recipe, device: str) -> Iterator[torch.Tensor]:
    """Yield (batch, context + 1) pieces from random places, without end."""
    draw = torch.Generator().manual_seed(0)
    length = recipe.sizes.context + 1
    while True:
        starts = torch.randint(0, len(ids) - length, (recipe.batch,), generator=draw)
        yield ids[starts[:, None] + torch.arange(length)].long().to(device, non_blocking=True)


def train(model: SparseLlama, data: Iterator[torch.Tensor], recipe: Recipe, device: str) -> list[dict[str, float]]:
    """Train until time or steps are over; return loss and penalty now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scale = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / recipe.warm_up, 1.0))
    feed_forwards = [module for module in model.modules() if isinstance(module, ReluFFN)]
    run = torch.compile(model.logits) if device.startswith("cuda") else model.logits
    log, begun = [], time.monotonic()
    for step in range(recipe.most_steps):
        batch = next(data)
        with torch.autocast(device.partition(":")[0], dtype=torch.bfloat16):
            logits = run(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        penalty = torch.stack([ffn.penalty for ffn in feed_forwards]).mean()
        (loss + recipe.l1 * penalty).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scale.step()
        over = time.monotonic() - begun > recipe.seconds or step == recipe.most_steps - 1
        if step % 50 == 0 or over:
            log.append({"step": step, "loss": loss.item(), "penalty": penalty.item()})
            print(f"step {step}: loss {loss.item():.3f}, penalty {penalty.item():.1f}", flush=True)
        if over:
            break
    return log


@torch.inference_mode()
def layer_inputs(model: SparseLlama, data: Iterator[torch.Tensor], tokens: int) -> list[torch.Tensor]:
    """Return what reaches each feed-forward for so many tokens, bf16."""
    model.eval().bfloat16()
    seen: list[list[torch.Tensor]] = [[] for _ in model.layers]
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args, kept=kept: kept.append(args[0].flatten(0, 1)))
        for layer, kept in zip(model.layers, seen, strict=True)
    ]
    for _ in range(-(-tokens // next(data)[:, :-1].numel())):
        model(next(data)[:, :-1])
    for hook in hooks:
        hook.remove()
    return [torch.cat(kept)[:tokens] for kept in seen]


def statistics(layer: int, ffn: ReluFFN, x: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a layer's row of results and the activity of its neurons, (tokens, inner) bool."""
    active = ffn.gate_proj(x) > 0
    found = TwellStatistics.of(active)
    counts = found.neuron_counts.sort(descending=True)[0].double()
    top = counts[: max(len(counts) // 10, 1)].sum() / counts.sum().clamp(min=1)
    unions = {
        f"union_of_{n}": float(active[: len(active) // n * n].view(-1, n, active.shape[1]).any(1).sum(1).float().mean())
        for n in (8, 64)
        if len(active) >= n
    }
    return {
        "layer": layer,
        "tokens": found.rows,
        "nonzeros_per_token": found.nonzeros / found.rows,
        "nonzero_fraction": found.nonzero_fraction,
        "fullest_row": found.fullest_row,
        "fullest_tile": int(found.peaks.nonzero().max()),
        "top_tenth_share": float(top),
        "dead_share": float((counts == 0).double().mean()),
        **unions,
    }, active


def pack_bits(active: torch.Tensor) -> torch.Tensor:
    """Return eight values a byte, the first in the lowest bit: (tokens, inner / 8) uint8."""
    bits = active.view(len(active), -1, 8).to(torch.uint8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8).cpu()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, three steps, on the CPU")
    parser.add_argument("--seconds", type=float, help="how long to train")
    parser.add_argument("--inner", type=int, help="intermediate size")
    parser.add_argument("--l1", type=float, help="weight of the penalty")
    parser.add_argument("--layer", type=int, default=1, help="the layer that is kept")
    parser.add_argument("--out", type=Path, required=True, help="where one layer's weights and inputs go")
    parser.add_argument("--mask", type=Path, help="where its activity goes, bit-packed")
    parser.add_argument("--results", type=Path, default=Path("results/sparse_training.json"))
    parser.add_argument("--commit", help="what to record as the commit")
    options = parser.parse_args(arguments)
    recipe = TINY if options.tiny else GPU
    recipe = replace(recipe, l1=options.l1 or recipe.l1, seconds=options.seconds or recipe.seconds)
    recipe = replace(recipe, sizes=replace(recipe.sizes, inner=options.inner or recipe.sizes.inner))
    device = "cpu" if options.tiny else "cuda:0"

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    ids = token_ids(recipe)
    print(f"{len(ids)} tokens of text", flush=True)
    model = SparseLlama(recipe.sizes).to(device)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    data = batches(ids, recipe, device)
    log = train(model, data, recipe, device)
    inputs = layer_inputs(model, data, recipe.kept_tokens)
    rows = []
    for index, (layer, x) in enumerate(zip(model.layers, inputs, strict=True)):
        row, active = statistics(index, layer.mlp, x)
        rows.append({"l1": recipe.l1, "steps": log[-1]["step"] + 1, "loss": log[-1]["loss"], **row})
        print(row, flush=True)
        if index == options.layer:
            parts = {name: getattr(layer.mlp, f"{name}_proj").weight.detach() for name in ("gate", "up", "down")}
            torch.save({"x": x, **parts}, options.out)
            if options.mask:
                options.mask.write_bytes(pack_bits(active[: recipe.mask_tokens]).numpy().tobytes())
    where = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    write_results(options.results, rows, commit=options.commit, device=where)
    return 0


if __name__ == "__main__":
    sys.exit(main())
