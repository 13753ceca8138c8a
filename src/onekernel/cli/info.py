"""Say what a model is and what a token costs, from its headers alone; only --neurons reads its weights.

The last line is the limit: no decoder that reads each weight once per token can be faster than the memory allows. The
memory's speed is measured on this device in a fraction of a second. With --neurons a model with a ReLU gate also reads
a text, on any device, and the active neurons of each layer are counted.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from onekernel.cli.console import Console
from onekernel.cli.flags import add_context, add_model, engine_config, model_name
from onekernel.errors import ConfigError

if TYPE_CHECKING:
    from onekernel.cli.model_facts import ModelFacts
    from onekernel.config import ModelConfig

HELP = "what a model is and what a token costs"
USAGE = "MODEL [--neurons [--text FILE]] [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--neurons", action="store_true", help="run the model on a text and show each layer's active neurons"
    )
    parser.add_argument("--text", metavar="FILE", help="read by --neurons (default: a sample; -: standard input)")
    add_context(parser, "with --neurons: tokens that are read at most (default 512; 0: the model's maximum)")
    add_model(parser, running=False)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    name, options = model_name(args), engine_config(args)
    if not args.neurons and (args.text is not None or args.max_context is not None):
        flag = "--text" if args.text is not None else "--ctx-size"
        raise ConfigError(f"{flag} is for the text that --neurons reads; add --neurons")

    import json
    from dataclasses import asdict

    from onekernel.cli.model_facts import read_facts
    from onekernel.cli.neurons import count_neurons, describe_neurons, refuse_always_active

    facts = read_facts(name, options, revision=args.revision, load_format=args.load_format, listener=console.listener())
    if args.neurons:
        refuse_always_active(facts.config, facts.name)
    report = count_neurons(args, facts.config, console) if args.neurons else None
    if args.json:
        counted = {} if report is None else {"neurons": report.as_json()}
        console.data(json.dumps(asdict(facts) | counted, indent=1))
        return 0
    for label, value in describe(facts):
        console.data(f"{label:14} {value}")
    for line in [] if report is None else describe_neurons(report):
        console.data(line)
    return 0


def describe(facts: ModelFacts) -> list[tuple[str, str]]:
    """Return (label, value) lines for people."""
    from onekernel.engine.memory import format_bytes

    config = facts.config
    heads = f"{config.num_attention_heads} heads, {config.num_key_value_heads} KV heads of {config.head_dim}"
    extras = [
        ("tied embeddings", config.tie_word_embeddings),
        ("QKV bias", config.qkv_bias),
        ("QK-norm", config.qk_norm),
        ("sub-norms", config.sub_norms),
        (_ternary(config), config.ternary is not None),
    ]
    stored = "no weights here"
    if facts.stored_bytes is not None:
        kinds = ", ".join(f"{count} {kind}" for kind, count in facts.stored_types.items())
        stored = f"{format_bytes(facts.stored_bytes)}: {kinds} tensors"
    scaling = config.rope_scaling
    stretch = "" if scaling.kind == "default" else f", {scaling.kind} scaling by {scaling.factor:g}"
    thinking = f"yes, {facts.thinking_tags[0]} ... {facts.thinking_tags[1]}" if facts.thinking_tags else "no"
    kinds_in_memory = facts.dtype if config.ternary is None else f"ternary codes and {facts.dtype}"
    decode = f"{format_bytes(facts.weight_bytes_per_token)} of weights"
    return [
        ("model", f"{facts.name} ({facts.source})"),
        ("architecture", ", ".join([config.architecture, *(name for name, has in extras if has)])),
        (
            "dimensions",
            f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, intermediate {config.intermediate_size}, "
            f"{heads}, vocabulary {config.vocab_size}",
        ),
        ("parameters", f"{facts.parameters:,}"),
        ("in the files", stored),
        ("in memory", f"{format_bytes(facts.memory_bytes)} as {kinds_in_memory}"),
        *_neurons(config),
        ("context", f"{facts.context_limit} tokens, RoPE base {config.rope_theta:g}{stretch}"),
        (
            "KV cache",
            f"{format_bytes(facts.kv_bytes_per_token)} per token, "
            f"{format_bytes(facts.kv_bytes_per_token * facts.context_limit)} for the whole context",
        ),
        ("chat template", "yes" if facts.chat_template else "no"),
        ("thinking", thinking),
        ("ends at ids", ", ".join(map(str, facts.eos_token_ids)) or "none"),
        ("read per token", f"{decode}, and the KV cache so far"),
        (
            "limit",
            f"{facts.limit_tokens_per_s:.1f} tok/s on {facts.device} reading {facts.read_gbps:.1f} GB/s "
            f"({facts.limit_tokens_per_s_full_context:.1f} at the end of the context)",
        ),
    ]


def _neurons(config: ModelConfig) -> list[tuple[str, str]]:
    """Return the line about neurons that may not fire, if there are any."""
    if config.hidden_act == "silu" or config.ternary is not None:
        return []
    many = f"{config.intermediate_size} a layer behind a ReLU gate"
    return [("neurons", f"{many}; --neurons counts how many are active")]


def _ternary(config: ModelConfig) -> str:
    """Return what is ternary and how scales are shared; empty if nothing is."""
    if config.ternary is None:
        return ""
    group, head = config.ternary.group, config.ternary.head
    scales = "one scale a projection" if group is None else f"a scale for {group} columns"
    return f"ternary with {scales}" + ("" if head == "dense" else f", {head} head")
