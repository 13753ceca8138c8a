"""Texts from what a researcher has: plain text, parquet, and data sets that Hugging Face's `datasets` saved to disk."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from onekernel.errors import ConfigError, TrainingError

_DATASET, _DATASETS = "state.json", "dataset_dict.json"
_BATCH_ROWS = 1024


def documents(sources: Sequence[str], column: str) -> Iterator[str]:
    """Yield every document of the sources: a text file each, a row each of the others; empty ones are left out.

    In a fixed order: sources as given, the files of a folder by name. `column` holds the text of rows. Raises
    ConfigError for a source that is not there, TrainingError naming the file that is damaged or is no text.
    """
    for source in sources:
        for path in _files(Path(source).expanduser()):
            for text in _texts(path, column):
                if text.strip():
                    yield text


def _files(path: Path) -> list[Path]:
    """Return a source's files; a saved data set counts as one."""
    if path.is_dir():
        if (path / _DATASET).is_file() or (path / _DATASETS).is_file():
            return [path]
        found = sorted(entry for entry in path.rglob("*") if entry.suffix in (".txt", ".parquet") and entry.is_file())
        if not found:
            raise ConfigError(f"{path} has no .txt or .parquet file below it and is no data set saved by save_to_disk")
        return found
    if not path.exists():
        raise ConfigError(f"there is no {path}; give text files, .parquet files, or folders of them")
    return [path]


def _texts(path: Path, column: str) -> Iterator[str]:
    if path.is_dir():
        return _saved_dataset(path, column)
    if path.suffix == ".parquet":
        return _parquet(path, column)
    return iter([_plain(path)])


def _plain(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror or error}") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrainingError(
            f"{path} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}; convert it or leave it out"
        ) from None


def _parquet(path: Path, column: str) -> Iterator[str]:
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        _check_column(path, column, file.schema_arrow)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
            yield from _strings(path, column, batch.column(0))
    except (pyarrow.ArrowException, OSError) as error:
        raise TrainingError(f"{path} cannot be read as parquet ({error}); fetch it again") from None


def _saved_dataset(path: Path, column: str) -> Iterator[str]:
    """Yield the rows of a data set, of a dictionary of them those of "train", else of all."""
    pyarrow = _pyarrow(path)
    if (path / _DATASETS).is_file():
        splits = _json(path / _DATASETS).get("splits", [])
        for split in ["train"] if "train" in splits else splits:
            yield from _saved_dataset(path / split, column)
        return
    for entry in _json(path / _DATASET).get("_data_files", []):
        file = path / Path(str(entry.get("filename"))).name
        try:
            with pyarrow.memory_map(str(file)) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
                _check_column(file, column, stream.schema)
                for batch in stream:
                    yield from _strings(file, column, batch.column(batch.schema.get_field_index(column)))
        except (pyarrow.ArrowException, OSError) as error:
            raise TrainingError(f"{file} cannot be read as Arrow ({error}); save the data set again") from None


def _strings(path: Path, column: str, values: Any) -> Iterator[str]:
    for value in values.to_pylist():
        if value is None:
            continue
        if not isinstance(value, str):
            raise TrainingError(f"{path}: column {column!r} holds {type(value).__name__}, not text; set data.column")
        yield value


def _check_column(path: Path, column: str, schema: Any) -> None:
    if column not in schema.names:
        near = difflib.get_close_matches(column, schema.names, n=1)
        advice = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(schema.names)}: set data.column"
        raise ConfigError(f"{path} has no column {column!r}; {advice}")


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read ({error}); save the data set again") from None
    if not isinstance(found, dict):
        raise TrainingError(f"{path} holds no JSON object; save the data set again")
    return found


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ModuleNotFoundError:
        raise ConfigError(f"{path} needs pyarrow: pip install pyarrow") from None
    return pyarrow
