"""The hub: what is fetched, what is refused before it is, and how a cache without network serves."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from onekernel.errors import HubError, ModelError, UnsupportedModelError
from onekernel.weights.hub import is_settings_file
from onekernel.weights.open import open_checkpoint
from tests.unit.weights.fake_hub import COMMIT, FakeHub
from tests.unit.weights.tiny import write_model, write_sharded

EXTRAS = {
    "README.md": b"words",
    "modeling_name.py": b"raise SystemExit('code was run')",
    "tokenizer.py": b"raise SystemExit('code was run')",
    "pytorch_model.bin": b"pickle",
    "onnx/model.onnx": b"other format",
    "original/consolidated.safetensors": b"twice",
    "model.fp16.safetensors": b"twice",
    "name.Q4_0.gguf": b"twice",
    "tokenizer/tokenizer.json": b"another part's",
}
SETTINGS = {
    "generation_config.json": b'{"eos_token_id": 2}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b'{"a": 1}',  # no two alike: the cache keeps equal contents once
    "tokenizer.model": b"model",
    "special_tokens_map.json": b'{"b": 1}',
    "chat_template.jinja": b"{{ messages }}",
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def model(tmp_path: Path) -> tuple[dict[str, bytes], dict[str, torch.Tensor]]:
    """The files of a whole repository, and its tensors."""
    folder = tmp_path / "model"
    folder.mkdir()
    saved = write_model(folder)
    return contents(folder) | SETTINGS | EXTRAS, saved


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no offline mode."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return folder


Serve = Callable[..., FakeHub]


@pytest.fixture
def serve(cache: Path) -> Iterator[Serve]:
    def start(files: dict[str, bytes], **behaviour: Any) -> FakeHub:
        hub = FakeHub(files, **behaviour)
        huggingface_hub.set_client_factory(hub.client)
        return hub

    yield start
    huggingface_hub.set_client_factory(_no_client)


def _no_client() -> NoReturn:
    raise AssertionError("a test without the fake hub asked for a client")


def test_only_the_needed_files_are_fetched(serve: Serve, model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    files, saved = model
    hub = serve(files)
    said: list[str] = []
    checkpoint = open_checkpoint("org/name", progress=said.append)
    assert hub.fetched() == {"config.json", "model.safetensors", *SETTINGS}
    assert torch.equal(checkpoint.read("lm_head.weight"), saved["lm_head.weight"])
    assert (checkpoint.settings.name, checkpoint.settings.source) == ("org/name", "org/name")
    assert checkpoint.settings.generation_config == {"eos_token_id": 2}
    directory = checkpoint.settings.tokenizer.directory
    assert directory is not None
    assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors", *SETTINGS}
    size = len(files["model.safetensors"]) / 1e6
    assert said[0].startswith("fetching 0.0 MB of org/name: chat_template.jinja, config.json, ")
    assert said[1:] == [f"fetching {size:.1f} MB of org/name: model.safetensors"]
    assert capsys.readouterr().err == ""  # no bars where there is no terminal


def test_shards_are_those_of_the_index(serve: Serve, tmp_path: Path) -> None:
    saved = write_sharded(tmp_path)
    index = contents(tmp_path)
    hub = serve(index | EXTRAS | {"model-00003-of-00003.safetensors": b"of an older upload"})
    checkpoint = open_checkpoint("org/name")
    assert hub.fetched() == set(index)
    assert checkpoint.tensors.keys() == saved.keys()


def test_a_second_time_nothing_is_fetched(serve: Serve, model: Any) -> None:
    serve(model[0])
    open_checkpoint("org/name")
    hub = serve(model[0])
    said: list[str] = []
    open_checkpoint("org/name", progress=said.append)
    assert hub.fetched() == set()
    assert said == []


def test_an_interrupted_fetch_goes_on(serve: Serve, model: Any) -> None:
    serve(model[0])
    open_checkpoint("org/name", load_format="dummy")  # settings alone
    hub = serve(model[0])
    open_checkpoint("org/name")
    assert hub.fetched() == {"model.safetensors"}


def test_a_network_that_fails_midway_says_how_to_go_on(
    serve: Serve, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client waits between its own attempts
    serve(model[0], files_down=True)
    with pytest.raises(
        HubError, match=r"fetching org/name broke off \(.*\); run it again: what has been fetched is kept"
    ):
        open_checkpoint("org/name")


def test_dummy_weights_fetch_no_weights(serve: Serve, model: Any) -> None:
    hub = serve(model[0])
    checkpoint = open_checkpoint("org/name", load_format="dummy")
    assert hub.fetched() == {"config.json", *SETTINGS}
    assert checkpoint.read("lm_head.weight").shape == (50, 64)
    assert checkpoint.settings.tokenizer.directory is not None


def test_a_revision_is_asked_for_and_kept(serve: Serve, model: Any, cache: Path) -> None:
    hub = serve(model[0])
    open_checkpoint("org/name", revision="v1.0")
    assert "GET /api/models/org/name/revision/v1.0" in hub.requests
    assert (cache / "models--org--name" / "refs" / "v1.0").read_text() == COMMIT
    with pytest.raises(HubError, match=r"org/name has no revision 'other'"):
        open_checkpoint("org/name", revision="other")


def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(serve: Serve, model: Any) -> None:
    files = dict(model[0])
    files["config.json"] = files["config.json"].replace(b"LlamaForCausalLM", b"MixtralForCausalLM")
    hub = serve(files)
    with pytest.raises(UnsupportedModelError, match="mixtures of experts"):
        open_checkpoint("org/name")
    assert "model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["config.json", "pytorch_model.bin"], UnsupportedModelError, "org/name has its weights only in pickled files"),
        (["adapter_config.json", "adapter_model.safetensors"], UnsupportedModelError, "org/name holds an adapter"),
        (["name.Q4_0.gguf", "README.md"], ModelError, "no config.json but GGUF files; .* name.Q4_0.gguf"),
        (["README.md"], ModelError, "org/name has no config.json"),
    ],
)
def test_another_kind_of_repository_is_refused_by_name(
    serve: Serve, model: Any, names: list[str], error: type[ModelError], words: str
) -> None:
    hub = serve({name: model[0].get(name, b"{}") for name in names})
    with pytest.raises(error, match=words):
        open_checkpoint("org/name")
    assert hub.fetched() <= {"config.json"}


@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_repository_names_its_licence_page_and_the_token(serve: Serve, model: Any, status: int) -> None:
    """The hub lists a gated repository but sends no file of it."""
    serve(model[0], refuse_files=(status, "GatedRepo"))
    with pytest.raises(
        HubError, match=r"gated; accept its licence at https://huggingface.co/org/name and set HF_TOKEN"
    ):
        open_checkpoint("org/name")


@pytest.mark.parametrize("code", ["GatedRepo", ""])
def test_a_refused_listing_names_the_page_and_the_token(serve: Serve, model: Any, code: str) -> None:
    serve(model[0], refuse=(403, code))
    with pytest.raises(HubError, match=r"licence at https://huggingface.co/org/name .*set HF_TOKEN"):
        open_checkpoint("org/name")


def test_no_such_repository(serve: Serve) -> None:
    serve({})
    with pytest.raises(HubError, match=r"no model org/other, or it is private; check .*/org/other, and set HF_TOKEN"):
        open_checkpoint("org/other")


def test_an_impossible_name(serve: Serve) -> None:
    serve({})
    with pytest.raises(HubError, match=r"is no hub id .* give org/name or a local path"):
        open_checkpoint("org/name--x..y")


def test_too_small_a_disk_is_said_before_anything_is_fetched(
    serve: Serve, model: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = serve(model[0])
    looked: list[Path] = []

    def usage(path: Path) -> SimpleNamespace:
        looked.append(path)
        return SimpleNamespace(free=20_000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(HubError, match=rf"needs 0.00 GB more in {cache}, where 0.00 GB are free; .* set HF_HOME"):
        open_checkpoint("org/name")
    assert "model.safetensors" not in hub.fetched()
    assert looked[0] == cache.parent  # the cache itself does not exist yet


@pytest.mark.complaint("D4", file="weights/hub.py", old="if is_offline_mode() else", new="if False else")
def test_offline_mode_works_from_the_cache_without_a_look_at_the_network(
    serve: Serve, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(model[0])
    open_checkpoint("org/name")
    hub = serve(model[0])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    checkpoint = open_checkpoint("org/name")
    assert torch.equal(checkpoint.read("lm_head.weight"), model[1]["lm_head.weight"])
    assert hub.requests == []


@pytest.mark.complaint(
    "D4", file="weights/hub.py", old="except (httpx.TransportError, ConnectionError", new="except (ConnectionError"
)
def test_a_blocked_network_works_from_the_cache(serve: Serve, model: Any) -> None:
    serve(model[0])
    open_checkpoint("org/name")
    hub = serve(model[0], down=True)
    said: list[str] = []
    checkpoint = open_checkpoint("org/name", progress=said.append)
    assert torch.equal(checkpoint.read("lm_head.weight"), model[1]["lm_head.weight"])
    assert len(hub.requests) == 1
    (note,) = said
    assert "cannot be reached (ConnectError: Network is unreachable); looking for org/name in the cache" in note


def test_a_hub_that_fails_works_from_the_cache(serve: Serve, model: Any) -> None:
    serve(model[0])
    open_checkpoint("org/name")
    serve(model[0], refuse=(500, ""))
    assert open_checkpoint("org/name").tensors


@pytest.mark.parametrize("down", [True, False])
def test_not_cached_and_no_network_says_both(
    serve: Serve, down: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not down)
    serve({}, down=down)
    why = r"the hub cannot be reached \(ConnectError" if down else "HF_HUB_OFFLINE is set"
    with pytest.raises(HubError, match=rf"org/name is not in the cache \({cache}\), and {why}"):
        open_checkpoint("org/name")
    with pytest.raises(HubError, match="org/name at revision v2 is not in the cache"):
        open_checkpoint("org/name", revision="v2")


def test_a_half_fetched_model_offline_names_what_lacks(
    serve: Serve, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(model[0])
    open_checkpoint("org/name", load_format="dummy")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"org/name is cached without model.safetensors, and HF_HUB_OFFLINE is set"):
        open_checkpoint("org/name")


def test_a_hub_id_whose_config_is_shipped(serve: Serve, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(model[0])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"HF_HUB_OFFLINE is set.*; its config is shipped too, as Llama-3\.2-1B"):
        open_checkpoint("meta-llama/Llama-3.2-1B", load_format="dummy")


def test_hf_home_and_offline_come_from_the_environment(tmp_path: Path) -> None:
    """In a process of its own, with a cache laid out by hand as huggingface-hub does."""
    snapshot = tmp_path / "home" / "hub" / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    write_model(snapshot)
    refs = tmp_path / "home" / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    code = (
        "import socket, sys\n"
        "def touched(*a, **k): raise SystemExit('the network was touched')\n"
        "socket.getaddrinfo = socket.socket.connect = touched\n"
        "from onekernel.weights.open import open_checkpoint\n"
        "print(open_checkpoint('org/name').read('model.norm.weight').shape[0])"
    )
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.returncode) == ("64", 0), done.stderr


def test_no_code_and_no_pickle_is_ever_a_settings_file() -> None:
    for name in EXTRAS:
        assert not is_settings_file(name)
    for name in (*SETTINGS, "config.json", "model.safetensors.index.json", "chat_template.json"):
        assert is_settings_file(name)
