"""Text with something to learn, and a run so small that it takes no time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from onekernel.train.settings import Settings, settings_from

WORDS = ["whale", "ship", "captain", "sea", "harpoon", "wind", "sail", "mast", "storm", "deck"]


def write_text(path: Path, words: int = 1500, seed: int = 0) -> Path:
    """Write words of which every one has two that may follow."""
    dice, word, said = random.Random(seed), 0, []
    for _ in range(words):
        word = (3 * word + dice.choice((1, 4))) % len(WORDS)
        said.append(WORDS[word])
    path.write_text(" ".join(said) + ".\n")
    return path


def values(folder: Path, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What a run's TOML file would hold; `sections` change or add keys."""
    told: dict[str, dict[str, Any]] = {
        "run": {
            "directory": str(folder / "run"),
            "steps": 6,
            "batch": 4,
            "log_every": 1,
            "checkpoint_every": 2,
            "evaluate_every": 0,
            "device": "cpu",
            "picture": False,
        },
        "data": {"train": [str(folder / "text.txt")], "context": 16},
        "tokenizer": {"vocab_size": 280},
        "model": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        "optimizer": {"learning_rate": 5e-3, "warm_up": 2},
        "sparsity": {"l1": 1e-3, "l1_warm_up": 2},
    }
    for name, changes in sections.items():
        told[name] = {**told[name], **changes}
    return told


def settings(folder: Path, **sections: dict[str, Any]) -> Settings:
    """The settings of such a run, whose text is written if it is not there."""
    if not (folder / "text.txt").exists():
        write_text(folder / "text.txt")
    return settings_from(values(folder, **sections))


def toml(told: dict[str, dict[str, Any]]) -> str:
    """The values as a TOML file."""
    lines = []
    for section, keys in told.items():
        lines += [f"[{section}]", *(f"{key} = {_value(value)}" for key, value in keys.items()), ""]
    return "\n".join(lines)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
