"""Measure how well a model predicts a text, in llama-perplexity's windows.

Windows of --ctx-size tokens do not overlap and each begins with the BOS token, if the model adds one; tokens in the
second half of each are scored. The running value goes to stderr, the result to stdout.
"""

from __future__ import annotations

import argparse
import sys

from onekernel.cli.console import Console
from onekernel.cli.flags import add_context, add_model
from onekernel.errors import ConfigError

HELP = "measure how well a model predicts a text"
USAGE = "MODEL --file TEXT [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("-f", "--file", metavar="FILE", required=True, help="the text, UTF-8 (-: standard input)")
    parser.add_argument("--chunks", metavar="N", type=int, help="windows at most (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_context(parser, "tokens of a window (default 512; 0: the model's maximum)")
    add_model(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    from onekernel.cli.text_input import read_text

    if args.chunks is not None and args.chunks < 1:
        raise ConfigError(f"--chunks is {args.chunks}; it must be at least 1")
    text = read_text(args.file)

    import json

    from onekernel.cli.session import open_llm
    from onekernel.engine.reference_backend import ReferenceBackend
    from onekernel.measure.perplexity import Estimate, running_perplexity, windows

    asked = 512 if args.max_context is None else args.max_context
    with open_llm(args, console, max_context=asked, backend="reference") as llm:
        backend, tokenizer = llm.loaded.engine.backend, llm.tokenizer
        if not isinstance(backend, ReferenceBackend):
            raise ConfigError(f"--backend is {backend.name}; perplexity needs reference")
        n_ctx = llm.max_context
        before = tokenizer.encode_prompt("")  # the BOS token, if the model adds one
        token_ids = [*before, *tokenizer.encode(text, add_special_tokens=False, parse_special=False)]
        cut = windows(token_ids, n_ctx, before[0] if before else None)[: args.chunks]
        console.note(f"{len(token_ids)} tokens, {len(cut)} {'window' if len(cut) == 1 else 'windows'} of {n_ctx}")
        estimate = Estimate()
        for number, estimate in enumerate(running_perplexity(cut, backend.logits), start=1):
            print(f"[{number}]{estimate.ppl:.4f},", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
    if args.json:
        found = {
            "ppl": estimate.ppl,
            "error": estimate.error,
            "tokens_scored": estimate.tokens,
            "windows": len(cut),
            "n_ctx": n_ctx,
            "model": llm.loaded.settings.name,
            "device": backend.device,
            "dtype": str(llm.loaded.dtype).removeprefix("torch."),
        }
        console.data(json.dumps(found))
    else:
        console.data(f"PPL = {estimate.ppl:.4f} +/- {estimate.error:.5f}")
    return 0
