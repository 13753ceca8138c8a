"""A run's TOML file: strict, and errors that name the key, what was found and the nearest name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from onekernel.errors import ConfigError
from onekernel.train.settings import Settings, new_model, read_settings, settings_from
from tests.unit.train.tiny import toml, values

ROOT = Path(__file__).resolve().parents[3]


def test_a_file_and_the_same_values_are_the_same(tmp_path: Path) -> None:
    told = values(tmp_path)
    (tmp_path / "run.toml").write_text(toml(told))
    assert read_settings(tmp_path / "run.toml") == settings_from(told)


def test_the_example_is_whole() -> None:
    settings = read_settings(ROOT / "examples" / "train-sparse.toml")
    assert (ROOT / settings.data.train[0]).is_file()
    assert new_model(settings, 512).hidden_act == "relu"


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("run", {"stepz": 3}, "there is no key run.stepz; did you mean run.steps?"),
        ("optimizer", {"xyz": 3}, "there is no key optimizer.xyz; known here: learning_rate, warm_up"),
        ("run", {"steps": "many"}, "run.steps is 'many'; expected int"),
        ("run", {"steps": 0}, "run.steps is 0; expected int >= 1"),
        ("run", {"steps": 1.5}, "run.steps is 1.5; expected int"),
        ("run", {"compile": 1}, "run.compile is 1; expected bool"),
        ("run", {"parallel": "tp"}, "run.parallel is 'tp'; it must be ddp or fsdp2"),
        ("run", {"parallel": 3}, "run.parallel is 3; it must be ddp or fsdp2"),
        ("model", {"hidden_act": "gelu"}, "model.hidden_act is 'gelu'; it must be relu, relu2 or silu"),
        ("sparsity", {"renoise": 1.5}, "sparsity.renoise is 1.5; expected float <= 1.0"),
        ("data", {"train": []}, "data.train is []; expected array of length >= 1"),
        ("data", {"train": ["a", 7]}, "data.train[1] is 7; expected str"),
        ("optimizer", {"beta1": 1.0}, "optimizer.beta1 is 1.0; expected float < 1.0"),
        ("sparsity", {"l1": -1e-5}, "sparsity.l1 is -1e-05; expected float >= 0.0"),
        ("model", {"start": "x"}, "leave out model.hidden_size, model.intermediate_size"),
        ("model", {"hidden_size": 0}, "model.hidden_size is 0; expected int >= 1"),
    ],
)
def test_a_wrong_key_or_value_is_named(section: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml(values(tmp_path, **{section: changes})))
    with pytest.raises(ConfigError) as caught:
        read_settings(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_an_unknown_section_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no key sparcity; did you mean sparsity\?"):
        settings_from({**values(tmp_path), "sparcity": {}})


def test_a_section_that_is_no_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="data is 3; expected object"):
        settings_from({**values(tmp_path), "data": 3})


@pytest.mark.parametrize(("section", "key"), [("run", "directory"), ("run", "steps"), ("data", "train")])
def test_what_has_no_default_must_be_there(section: str, key: str, tmp_path: Path) -> None:
    told = values(tmp_path)
    del told[section][key]
    with pytest.raises(ConfigError, match=rf"{section}\.{key} is missing; it has no default"):
        settings_from(told)


def test_a_new_model_needs_its_dimensions(tmp_path: Path) -> None:
    told = values(tmp_path)
    del told["model"]["hidden_size"]
    with pytest.raises(ConfigError, match=r"^model\.hidden_size is missing"):
        settings_from(told)


@pytest.mark.parametrize(("content", "message"), [(b"[run\n", "is not valid TOML"), (b"\xff\xfe", "is not valid TOML")])
def test_a_file_that_is_no_toml(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_settings(tmp_path / "run.toml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_settings(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "hidden_size is 32, not a multiple of"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads, 3"),
        ({"max_position_embeddings": 8}, "data.context is 16 and model.max_position_embeddings 8"),
    ],
)
def test_dimensions_that_contradict_each_other(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        new_model(settings_from(values(tmp_path, model=changes)), 280)


def test_the_recipe_in_the_docs_is_whole() -> None:
    (recipe,) = re.findall(r"^```toml\n(.*?)^```", (ROOT / "docs" / "training.md").read_text(), re.S | re.M)
    settings = settings_from(tomllib.loads(recipe))
    assert 0.4e9 < new_model(settings, 49152).parameters < 0.6e9


def test_the_docs_name_every_key() -> None:
    rows = re.findall(r"^\| `\[(\w+)\]` \| (.*) \|$", (ROOT / "docs" / "training.md").read_text(), re.M)
    named = {section: set(re.findall(r"`(\w+)`", text)) for section, text in rows}
    for section in msgspec.structs.fields(Settings):
        keys = {field.name for field in msgspec.structs.fields(section.type)}
        assert keys <= named[section.name], section.name
