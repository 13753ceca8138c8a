"""The list of environment variables, and a cache folder that always exists."""

from __future__ import annotations

import ast
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import onekernel
from onekernel import env


@pytest.fixture(autouse=True)
def no_memory_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    env.cache_dir.cache_clear()
    for name in ("ONEKERNEL_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    yield
    env.cache_dir.cache_clear()


def test_a_listed_variable_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKERNEL_LOG", "debug")
    assert env.get("ONEKERNEL_LOG") == "debug"
    monkeypatch.setenv("ONEKERNEL_LOG", "")
    assert env.get("ONEKERNEL_LOG") is None
    monkeypatch.delenv("ONEKERNEL_LOG")
    assert env.get("ONEKERNEL_LOG") is None


def test_a_variable_that_is_not_listed_is_a_mistake_of_ours() -> None:
    with pytest.raises(KeyError, match=r"ONEKERNEL_SECRET is not in onekernel\.env\.VARIABLES"):
        env.get("ONEKERNEL_SECRET")


def test_the_list_is_short_and_says_what_each_one_does() -> None:
    names = [variable.name for variable in env.VARIABLES]
    assert len(set(names)) == len(names) <= 10
    assert all(variable.meaning for variable in env.VARIABLES)
    assert all(variable.ours == variable.name.startswith("ONEKERNEL_") for variable in env.VARIABLES)


def test_our_variables_are_read_here_and_nowhere_else() -> None:
    listed = {variable.name for variable in env.VARIABLES}
    for path in Path(onekernel.__file__).parent.rglob("*.py"):
        names = {
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier()
        }
        assert {name for name in names if name.startswith("ONEKERNEL_")} <= listed, path


@pytest.mark.parametrize("variable", ["ONEKERNEL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_the_cache_folder_is_made_where_the_variables_say(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "with space"))
    below = {"ONEKERNEL_CACHE_DIR": "", "XDG_CACHE_HOME": "onekernel", "HOME": ".cache/onekernel"}[variable]
    assert env.cache_dir() == tmp_path / "with space" / below
    assert env.cache_dir().is_dir()


def test_our_own_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("ONEKERNEL_CACHE_DIR", str(tmp_path / "ours"))
    assert env.cache_dir() == tmp_path / "ours"
    assert not (tmp_path / "xdg").exists()


@pytest.mark.parametrize("variable", ["ONEKERNEL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"])
def test_a_folder_that_cannot_be_made_gives_a_private_temporary_one(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv(variable, str(tmp_path / "file" / "below"))
    folder = env.cache_dir()
    assert folder.parent == tmp_path / "tmp"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert env.cache_dir() == folder  # one per process
