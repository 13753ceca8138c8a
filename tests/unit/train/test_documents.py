"""Texts from files and folders. pyarrow is an extra, so what reads rows is tested with a stand-in of its interface."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from onekernel.errors import ConfigError, TrainingError
from onekernel.train.documents import documents


def read(*sources: Path, column: str = "text") -> list[str]:
    return list(documents([str(source) for source in sources], column))


def test_files_as_given_and_folders_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    for name, text in (("b.txt", "two"), ("a.txt", "one"), ("deep/c.txt", "three"), ("d.png", "no text")):
        (folder / name).write_text(text)
    (tmp_path / "notes.md").write_text("zero \N{SNOWMAN}")
    (tmp_path / "empty.txt").write_text(" \n")
    assert read(tmp_path / "notes.md", tmp_path / "empty.txt", folder) == ["zero \N{SNOWMAN}", "one", "two", "three"]


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no .*none; give text files"):
        read(tmp_path / "none")


def test_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has no \.txt or \.parquet file below it"):
        read(tmp_path)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(TrainingError, match=r"a\.txt is not UTF-8 text: byte 2 is 0xff"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["rows.parquet", "saved"])
def test_without_pyarrow_the_error_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = tmp_path / name
    if name == "saved":
        path.mkdir()
        (path / "state.json").write_text("{}")
    else:
        path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"needs pyarrow: pip install pyarrow"):
        read(path)


class Batch:
    """Rows in columns, with the few methods of pyarrow's that are used; files hold them as JSON."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = columns
        self.schema = SimpleNamespace(names=list(columns), get_field_index=lambda name: list(columns).index(name))

    def column(self, index: int) -> Any:
        return SimpleNamespace(to_pylist=lambda: list(self.columns.values())[index])


class Stream:
    """An opened file: its batches and their schema."""

    def __init__(self, content: bytes) -> None:
        if not content.startswith(b"["):
            raise FakeArrowError("no magic bytes")
        self.batches = [Batch(columns) for columns in json.loads(content)]
        self.schema = self.schema_arrow = self.batches[0].schema

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)

    def iter_batches(self, *, batch_size: int, columns: list[str]) -> Iterator[Batch]:
        return (Batch({name: batch.columns[name] for name in columns}) for batch in self.batches)


class FakeArrowError(Exception):
    pass


@pytest.fixture
def pyarrow(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, ipc, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.ipc"), ModuleType("pyarrow.parquet")
    fake.__dict__.update(ArrowException=FakeArrowError, memory_map=lambda name: Path(name).open("rb"), ipc=ipc)  # noqa: SIM115
    fake.__dict__.update(parquet=parquet)
    ipc.__dict__.update(open_stream=lambda file: Stream(file.read()))
    parquet.__dict__.update(ParquetFile=lambda path: Stream(Path(path).read_bytes()))
    for module in (fake, ipc, parquet):
        monkeypatch.setitem(sys.modules, module.__name__, module)


def write_rows(path: Path, *texts: list[Any], column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"id": list(range(len(part))), column: part} for part in texts]))
    return path


def save_dataset(folder: Path, *shards: list[str]) -> None:
    for number, shard in enumerate(shards):
        write_rows(folder / f"data-{number}.arrow", shard)
    files = [{"filename": f"data-{number}.arrow"} for number in range(len(shards))]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))


@pytest.mark.usefixtures("pyarrow")
def test_rows_of_parquet(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.parquet", ["one", None, ""], ["two"])
    assert read(path) == ["one", "two"]
    assert read(tmp_path) == ["one", "two"]


@pytest.mark.usefixtures("pyarrow")
def test_a_saved_data_set(tmp_path: Path) -> None:
    save_dataset(tmp_path / "set", ["one", "two"], ["three"])
    assert read(tmp_path / "set") == ["one", "two", "three"]


@pytest.mark.usefixtures("pyarrow")
@pytest.mark.parametrize(("splits", "expected"), [(["train", "test"], ["train"]), (["en", "de"], ["en", "de"])])
def test_of_several_splits_the_one_to_train_on(splits: list[str], expected: list[str], tmp_path: Path) -> None:
    for split in splits:
        save_dataset(tmp_path / split, [split])
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": splits}))
    assert read(tmp_path) == expected


@pytest.mark.usefixtures("pyarrow")
def test_another_column_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.parquet", ["one"], column="texts")
    with pytest.raises(ConfigError, match="has no column 'text'; did you mean 'texts'"):
        read(path)
    with pytest.raises(ConfigError, match=r"has no column 'body'; it has id, texts: set data\.column"):
        read(path, column="body")
    assert read(path, column="texts") == ["one"]


@pytest.mark.usefixtures("pyarrow")
def test_rows_that_are_no_text(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="column 'id' holds int, not text"):
        read(write_rows(tmp_path / "rows.parquet", ["one"]), column="id")


@pytest.mark.usefixtures("pyarrow")
def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR")
    with pytest.raises(TrainingError, match=r"rows\.parquet cannot be read as parquet \(no magic bytes\)"):
        read(tmp_path / "rows.parquet")
    save_dataset(tmp_path / "set", ["one"])
    (tmp_path / "set" / "data-0.arrow").write_bytes(b"?")
    with pytest.raises(TrainingError, match=r"data-0\.arrow cannot be read as Arrow"):
        read(tmp_path / "set")
    (tmp_path / "set" / "data-0.arrow").unlink()
    with pytest.raises(TrainingError, match=r"data-0\.arrow cannot be read as Arrow"):
        read(tmp_path / "set")
    (tmp_path / "set" / "state.json").write_text("[")
    with pytest.raises(TrainingError, match=r"state\.json cannot be read"):
        read(tmp_path / "set")
