"""What a user may type as a model, and what never touches the network."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from onekernel.errors import ConfigError, ModelError
from onekernel.weights.checkpoint import TokenizerFiles
from onekernel.weights.dummy import DummyCheckpoint
from onekernel.weights.open import LoadFormat, is_hub_id, open_checkpoint
from onekernel.weights.shipped import shipped_configs
from tests.unit.weights.gguf_files import write_tiny
from tests.unit.weights.tiny import CONFIG, write_config, write_model


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any look at the network, or at the hub's code, fails the test."""

    def touched(*args: object, **options: object) -> NoReturn:
        raise AssertionError(f"the network was touched: {args} {options}")

    monkeypatch.setattr(socket, "getaddrinfo", touched)
    monkeypatch.setattr(socket.socket, "connect", touched)
    monkeypatch.setattr("onekernel.weights.hub.HubModel.__init__", touched)


@pytest.mark.complaint(
    "D4",
    file="weights/open.py",
    old="return _open_directory(path, _local_settings(path))",
    new="from onekernel.weights.hub import HubModel; HubModel(model, revision, progress)",
)
@pytest.mark.usefixtures("no_network")
def test_a_local_directory_never_touches_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    write_model(folder)
    monkeypatch.chdir(tmp_path)
    for model in ("org/name", str(folder), "./org/name", "org/../org/name/"):
        checkpoint = open_checkpoint(model)
        assert checkpoint.read("model.norm.weight").shape == (64,)
        assert checkpoint.settings.name == "name"


@pytest.mark.complaint("D4", file="weights/open.py", old="return GgufCheckpoint(path)", new="pass")
@pytest.mark.usefixtures("no_network")
def test_a_local_gguf_never_touches_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(tmp_path / "tiny.gguf")
    for model in ("tiny.gguf", str(tmp_path / "tiny.gguf"), "~/tiny.gguf", "org/tiny"):
        assert open_checkpoint(model).read("model.norm.weight").dtype == torch.float32


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(
    "model",
    [
        "/nope/model",
        "./org/name",
        "../x",
        "~/org/name",
        "name",
        "org/name/more",
        "org/name.gguf",
        "",
        "org/",
        "~nobody-has-this-name/x",
    ],
)
def test_a_path_that_is_not_there_is_named(
    model: str, load_format: LoadFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if not model:
        write_config(tmp_path)  # the current directory must not be taken for it
    with pytest.raises(ModelError, match=r"no file or directory .*org/name, or with --load-format dummy one of Falcon"):
        open_checkpoint(model, load_format=load_format)


def test_org_name_is_a_hub_id_unless_it_is_a_file() -> None:
    assert is_hub_id("Qwen/Qwen3-0.6B")
    assert is_hub_id("HuggingFaceTB/SmolLM2-135M_x.y")
    for path in ("Qwen3-0.6B", "a/b/c", "./a/b", "/a/b", "a/b.gguf", "a/../b", "-a/b", "a b/c", "https://x/y"):
        assert not is_hub_id(path), path


def test_a_shipped_config_without_dummy_says_so() -> None:
    with pytest.raises(ModelError, match=r"Llama-3.2-1B is a shipped config, .* --load-format dummy"):
        open_checkpoint("Llama-3.2-1B")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_one_file_of_a_model_asks_for_its_directory(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match="one file of a model; give its directory"):
        open_checkpoint(str(tmp_path / name))


def test_a_revision_of_a_local_path_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(ConfigError, match=r"revision 'main' was given, but .* is a local path"):
        open_checkpoint(str(tmp_path), revision="main")


@pytest.mark.usefixtures("no_network")
class TestDummy:
    """load_format "dummy" needs a config.json and nothing else."""

    def test_a_shipped_config(self) -> None:
        for name in shipped_configs():
            checkpoint = open_checkpoint(name, load_format="dummy")
            assert isinstance(checkpoint, DummyCheckpoint)
            assert (checkpoint.settings.name, checkpoint.settings.tokenizer) == (name, TokenizerFiles())
            assert checkpoint.settings.notes == ("random weights: the text means nothing",)

    @pytest.mark.parametrize("given", ["", "config.json"])
    @pytest.mark.parametrize("with_tokenizer", [False, True])
    def test_a_directory_or_its_config(self, tmp_path: Path, given: str, with_tokenizer: bool) -> None:
        write_config(tmp_path)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2}')
        if with_tokenizer:
            (tmp_path / "tokenizer.json").write_text("{}")
        settings = open_checkpoint(str(tmp_path / given), load_format="dummy").settings
        assert settings.config == CONFIG
        assert settings.generation_config == {"eos_token_id": 2}
        assert settings.tokenizer.directory == (tmp_path if with_tokenizer else None)

    def test_a_config_of_another_name(self, tmp_path: Path) -> None:
        write_config(tmp_path)
        (tmp_path / "config.json").rename(tmp_path / "mine.json")
        settings = open_checkpoint(str(tmp_path / "mine.json"), load_format="dummy").settings
        assert (settings.name, settings.config, settings.tokenizer) == ("mine", CONFIG, TokenizerFiles())

    def test_a_gguf_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match=r"tiny.gguf is no config.json; dummy weights take one"):
            open_checkpoint(str(write_tiny(tmp_path)), load_format="dummy")


def test_opening_a_local_model_loads_no_http_client(tmp_path: Path) -> None:
    write_model(tmp_path)
    code = (
        "import sys; from onekernel.weights.open import open_checkpoint; open_checkpoint(sys.argv[1]).close();"
        "print([name for name in ('huggingface_hub', 'httpx', 'gguf', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_load_format_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    with pytest.raises(ConfigError, match="load_format is 'random'; it must be auto or dummy"):
        open_checkpoint(str(tmp_path), load_format="random")  # type: ignore[arg-type]
