"""A Hugging Face directory: its settings, and which of its files hold the weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NoReturn

from onekernel.errors import ModelError, UnsupportedModelError
from onekernel.weights.checkpoint import CheckpointSettings, TokenizerFiles
from onekernel.weights.json_file import read_json

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

RUN_CHECKPOINT, RUN_LOG, RUN_MODEL = "checkpoint.safetensors", "log.jsonl", "model"
"""What `onekernel train` writes into the folder of a run; the last is a directory like those that are read here."""

_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_settings(directory: Path, *, name: str, source: str, notes: tuple[str, ...] = ()) -> CheckpointSettings:
    """Read config.json and, if there is one, generation_config.json. Refuses an adapter's directory by name."""
    names = file_names(directory)
    if ADAPTER_CONFIG in names:
        refuse_adapter(source)
    if CONFIG not in names:
        if names & {RUN_CHECKPOINT, RUN_LOG}:
            _refuse_run(directory)
        refuse_without_config(names, source)
    generation = read_json(directory / GENERATION_CONFIG) if GENERATION_CONFIG in names else {}
    return CheckpointSettings(
        name=name,
        source=source,
        config=read_json(directory / CONFIG),
        generation_config=generation,
        tokenizer=TokenizerFiles(directory=directory),
        notes=notes,
    )


def file_names(directory: Path) -> frozenset[str]:
    """Return the names in a directory, not those below it."""
    try:
        return frozenset(entry.name for entry in directory.iterdir())
    except OSError as error:
        raise ModelError(f"{directory} cannot be read: {error.strerror or error}") from error


def index_shards(directory: Path) -> dict[str, str]:
    """Return tensor name -> file name from model.safetensors.index.json."""
    path = directory / INDEX
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(name, str) for name in placed.values()):
        raise ModelError(f"{path} has no weight_map from tensor to file names; fetch the file again")
    for name in placed.values():
        if Path(name).name != name:
            raise ModelError(f"{path} places tensors in {name!r}; shards must lie beside the index")
    return placed


def _refuse_run(directory: Path) -> NoReturn:
    model = directory / RUN_MODEL
    if (model / CONFIG).is_file():
        raise ModelError(f"{directory} is the folder of a training run; its model is {model}: give that")
    raise ModelError(
        f"{directory} is the folder of a training run that has not ended; go on with it by --resume, then give {model}"
    )


def refuse_adapter(source: str) -> NoReturn:
    """Raise UnsupportedModelError for a directory or repository with an adapter_config.json."""
    raise UnsupportedModelError(
        f"{source} holds an adapter ({ADAPTER_CONFIG}); merge it into its base model (peft: merge_and_unload, then "
        "save_pretrained) and give the merged directory"
    )


def refuse_without_config(names: Collection[str], source: str) -> NoReturn:
    """Raise for a directory or repository without a config.json, saying what is there instead."""
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if ggufs:
        raise ModelError(
            f"{source} has no {CONFIG} but GGUF files; give the path of one of them: {', '.join(ggufs[:5])}"
        )
    raise ModelError(
        f"{source} has no {CONFIG}; give a directory with config.json and {WEIGHTS} (one file or shards with their "
        "index), or a .gguf file"
    )


def refuse_without_safetensors(names: Collection[str], source: str) -> NoReturn:
    """Raise for a directory or repository without model.safetensors, saying what is there instead."""
    pickled = sorted(name for name in names if name.endswith(_PICKLED))
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    others = sorted(name for name in names if name.endswith(".safetensors"))
    if ggufs:
        raise ModelError(f"{source} has no {WEIGHTS} but GGUF files; give the path of one: {', '.join(ggufs[:5])}")
    if pickled:
        raise UnsupportedModelError(
            f"{source} has its weights only in pickled files ({', '.join(pickled[:3])}), which can run code when read; "
            "use a revision with safetensors, or convert once with transformers' save_pretrained"
        )
    if others:
        raise UnsupportedModelError(
            f"{source} has neither {WEIGHTS} nor {INDEX} but {', '.join(others[:3])}, which is another layout; "
            "use the files that transformers' save_pretrained writes"
        )
    raise ModelError(f"{source} has neither {WEIGHTS} nor {INDEX}; fetch the model again, or give a .gguf file")
