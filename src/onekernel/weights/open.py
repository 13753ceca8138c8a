"""From what the user typed to a `Checkpoint`: a directory, a .gguf file, a shipped config or a hub id."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

from onekernel.errors import ConfigError, ModelError
from onekernel.weights.architectures import model_config
from onekernel.weights.architectures.sparse import is_sparse
from onekernel.weights.checkpoint import Checkpoint, CheckpointSettings, TokenizerFiles
from onekernel.weights.directory import CONFIG, file_names, read_settings
from onekernel.weights.dummy import DummyCheckpoint
from onekernel.weights.gguf import GgufCheckpoint
from onekernel.weights.json_file import read_json
from onekernel.weights.published_sparse import PublishedSparseCheckpoint
from onekernel.weights.safetensors_dir import SafetensorsCheckpoint
from onekernel.weights.shipped import read_shipped, shipped_configs
from onekernel.weights.ternary.published import FILE as PUBLISHED
from onekernel.weights.ternary.published import PublishedCheckpoint

LoadFormat = Literal["auto", "dummy"]
Progress = Callable[[str], None]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_checkpoint(
    model: str, *, revision: str | None = None, load_format: LoadFormat = "auto", progress: Progress | None = None
) -> Checkpoint:
    """Open a directory, a .gguf file or a hub id; with load_format "dummy" a config.json or the name of a shipped one.

    A path that exists never touches the network. `progress` gets sentences about a download. Raises ModelError if
    there is no such model or its files are damaged, UnsupportedModelError for kinds that are not built in (for a hub id
    before the weights are fetched), HubError if fetching fails.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format is {load_format!r}; it must be auto or dummy")
    path = local_path(model)
    if revision is not None and path.exists():
        raise ConfigError(f"revision {revision!r} was given, but {model} is a local path; revisions are for hub ids")
    if load_format == "dummy":
        return DummyCheckpoint(_dummy_settings(model, path, revision, progress))
    if path.is_dir():
        return _open_directory(path, _local_settings(path))
    if path.exists():
        if path.suffix in (".json", ".safetensors", ".bin"):
            raise ModelError(f"{model} is one file of a model; give its directory, or a .gguf file")
        return GgufCheckpoint(path)
    if not is_hub_id(model):
        _refuse_missing(model)
    from onekernel.weights.hub import HubModel  # late: brings the HTTP client, which a local path does not need

    hub = HubModel(model, revision, progress)
    directory = hub.settings()
    model_config(read_settings(directory, name=model, source=model).config)  # refuse before gigabytes move
    directory = hub.weights(directory)
    return _open_directory(directory, read_settings(directory, name=model, source=model))


def is_hub_id(model: str) -> bool:
    """Whether this can be a hub's org/name, as opposed to a path."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith(".gguf")


def _open_directory(directory: Path, settings: CheckpointSettings) -> Checkpoint:
    if PUBLISHED in file_names(directory):
        return PublishedCheckpoint(directory, settings)
    files = SafetensorsCheckpoint(directory, settings)
    return PublishedSparseCheckpoint(files) if is_sparse(settings.config) else files


def local_path(model: str) -> Path:
    """Return the path that a model's name would be, whether there is anything or not; raises ModelError for no name."""
    if not model:  # Path("") would be the current directory
        _refuse_missing(model)
    with contextlib.suppress(RuntimeError):  # ~user of whom nobody knows the home
        return Path(model).expanduser()
    return Path(model)


def _local_settings(directory: Path) -> CheckpointSettings:
    return read_settings(directory, name=directory.resolve().name, source=str(directory))


def _dummy_settings(model: str, path: Path, revision: str | None, progress: Progress | None) -> CheckpointSettings:
    """Read the settings alone. The tokenizer is the directory's if it has one, else none."""
    if path.name == CONFIG and path.is_file():
        path = path.parent
    if path.is_dir():
        settings = _local_settings(path)
    elif path.is_file():
        if path.suffix != ".json":
            raise ModelError(f"{model} is no config.json; dummy weights take one, its directory or a shipped config")
        settings = _bare_settings(path.stem, str(path), read_json(path))
    elif model in shipped_configs():
        settings = _bare_settings(model, f"shipped config {model}", read_shipped(model))
    elif is_hub_id(model):
        from onekernel.weights.hub import HubModel

        try:
            settings = read_settings(HubModel(model, revision, progress).settings(), name=model, source=model)
        except ModelError as error:
            if (shipped := model.rpartition("/")[2]) in shipped_configs():
                raise type(error)(f"{error}; its config is shipped too, as {shipped}") from None
            raise
    else:
        _refuse_missing(model)
    directory = settings.tokenizer.directory
    if directory is not None and not (directory / "tokenizer.json").is_file():
        settings = replace(settings, tokenizer=TokenizerFiles())
    return replace(settings, notes=("random weights: the text means nothing",))


def _bare_settings(name: str, source: str, config: dict[str, object]) -> CheckpointSettings:
    return CheckpointSettings(name, source, config, generation_config={}, tokenizer=TokenizerFiles())


def _refuse_missing(model: str) -> NoReturn:
    if model in shipped_configs():
        raise ModelError(f"{model} is a shipped config, which has no weights; random ones: --load-format dummy")
    raise ModelError(
        f"there is no file or directory {model!r}; give a Hugging Face directory, a .gguf file, a hub id such as "
        f"org/name, or with --load-format dummy one of {', '.join(shipped_configs())}"
    )
