"""What `onekernel info --neurons` adds: the model reads a text, and each layer's active neurons are counted."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from onekernel.cli.console import Console
from onekernel.config import ModelConfig
from onekernel.errors import ConfigError, UnsupportedModelError
from onekernel.measure.neurons import LayerNeurons

TOKENS = 512
"""Read unless --ctx-size says otherwise: enough for a mean, and seconds on a CPU."""

CHARACTERS = 64
"""Of a text for each token that is read, before it is cut: encoding all of a large one takes long."""


@dataclass(frozen=True, slots=True)
class NeuronReport:
    """What was read and what was active."""

    text: str
    """The file's name, "the sample text", or "random tokens" for a dummy model, whose tokenizer knows no words."""
    tokens: int
    intermediate_size: int
    layers: list[LayerNeurons]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return asdict(self)


def refuse_always_active(config: ModelConfig, name: str) -> None:
    """Raise UnsupportedModelError for a model none of whose activations is exactly zero."""
    if config.hidden_act == "silu":
        raise UnsupportedModelError(
            f"the feed-forwards of {name} have the activation silu, which is never exactly zero: all "
            f"{config.intermediate_size} neurons of a layer are active for every token. --neurons is for relu and "
            "relu2; `onekernel sparsify` makes such a model of this one"
        )


def count_neurons(args: argparse.Namespace, config: ModelConfig, console: Console) -> NeuronReport:
    """Load the model on the PyTorch reference, on any device, and count over --text or the sample.

    Raises ConfigError for an empty text, and what `load_engine` raises.
    """
    from onekernel.cli.session import open_llm
    from onekernel.cli.text_input import read_text
    from onekernel.engine.reference_backend import ReferenceBackend
    from onekernel.measure.bench import random_ids
    from onekernel.measure.neurons import active_neurons
    from onekernel.measure.sample_text import SAMPLE_TEXT

    given = None if args.text is None else read_text(args.text)
    asked = min(TOKENS, config.context_limit) if args.max_context is None else args.max_context
    with open_llm(args, console, max_context=asked, backend="reference") as llm:
        backend = llm.loaded.engine.backend
        if not isinstance(backend, ReferenceBackend):
            raise ConfigError(f"the backend is {backend.name}; neurons are counted on reference")
        if given is None and args.load_format == "dummy":
            source, ids = "random tokens", list(random_ids(llm.max_context, config.vocab_size))
        else:
            source, text = ("the sample text", SAMPLE_TEXT) if given is None else (args.text, given)
            ids = llm.tokenizer.encode_prompt(text[: CHARACTERS * llm.max_context])
        if not ids:
            raise ConfigError(f"{source} is empty; name a text with --text FILE")
        if len(ids) > llm.max_context:
            console.note(f"only the first {llm.max_context} tokens of {source} are read; --ctx-size changes that")
        read = ids[: llm.max_context]
        return NeuronReport(source, len(read), config.intermediate_size, active_neurons(backend.inner(read)))


def describe_neurons(report: NeuronReport) -> list[str]:
    """Return a table for people: a line a layer, and their mean."""
    layers = report.layers
    lines = [
        "",
        f"active neurons of {report.intermediate_size} a layer, while reading {report.tokens} tokens of {report.text}:",
        "layer       mean        %     most    never",
    ]
    lines += [
        f"{layer.layer:5} {layer.mean:10.1f} {layer.percent:8.2f} {layer.most:8} {layer.never:8}" for layer in layers
    ]
    count = len(layers)
    mean, percent = (sum(getattr(layer, name) for layer in layers) / count for name in ("mean", "percent"))
    most, never = max(layer.most for layer in layers), sum(layer.never for layer in layers)
    return [*lines, f"{'all':>5} {mean:10.1f} {percent:8.2f} {most:8} {never:8}"]
