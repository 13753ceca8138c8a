from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from onekernel.errors import ModelError
from onekernel.text.tokenizer import Tokenizer
from tests.unit.text.conversations import user
from tests.unit.text.families import FAMILIES


def test_a_sentencepiece_model_is_told_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing.*tokenizer\.model.*AutoTokenizer"):
        Tokenizer.from_directory(tmp_path, {}, {})


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing; fetch"):
        Tokenizer.from_directory(tmp_path, {}, {})


@pytest.mark.parametrize("text", ["", "{", '{"version": "1.0"}', '{"version": "9.0", "model": {"type": "New"}}'])
def test_a_damaged_tokenizer_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Tokenizer.from_directory(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", b"{", "is not valid JSON"),
        ("tokenizer_config.json", b"[]", "holds list, not a JSON object"),
        ("tokenizer_config.json", b"\xff\xfe", "cannot be read"),
        ("chat_template.jinja", b"\xff", "cannot be read"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"7": {}}}', "is not built as transformers"),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}', "is not built as transformers"),
    ],
)
def test_damaged_settings(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    FAMILIES["smollm"].write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=f"{name} {words}"):
        Tokenizer.from_directory(tmp_path, {}, {})


def test_settings_may_be_missing(tmp_path: Path) -> None:
    FAMILIES["llama2"].write(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(tmp_path, {"bos_token_id": 1, "eos_token_id": 2}, {})
    assert tokenizer.encode_prompt("a")[0] == 1
    assert tokenizer.encode_prompt("<s>a").count(1) == 1
    assert tokenizer.decode([1, *tokenizer.encode_prompt("fox"), 2]) == "fox"


@pytest.mark.complaint("I1", file="text/hf_vocab.py", old="    backend.no_truncation()\n", new="")
def test_saved_truncation_and_padding_do_not_apply(tmp_path: Path) -> None:
    FAMILIES["smollm"].write(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(8)
    backend.enable_padding(length=32)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(tmp_path, {}, {})
    text = "one two three four five six seven eight nine ten"
    assert tokenizer.decode(tokenizer.encode_prompt(text)) == text
    assert len(tokenizer.encode_prompt("a")) == 1


@pytest.mark.complaint("F1", file="text/hf_vocab.py", old='config.get("add_bos_token") is True', new="False")
def test_bos_asked_for_only_by_the_settings(tmp_path: Path) -> None:
    FAMILIES["smollm"].write(tmp_path, add_bos_token=True)
    file = json.loads((tmp_path / "tokenizer.json").read_text())
    file["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = Tokenizer.from_directory(tmp_path, {}, {})
    assert tokenizer.encode_prompt("a")[0] == tokenizer.bos_token_id
    FAMILIES["smollm"].write(tmp_path, add_bos_token=False)
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    assert tokenizer.bos_token_id not in Tokenizer.from_directory(tmp_path, {}, {}).encode_prompt("a")


def test_bos_without_a_name(tmp_path: Path) -> None:
    """A post-processor may put in front what the settings do not call BOS; it is not doubled either."""
    path = FAMILIES["gpt2"].write(tmp_path, bos_token=None)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    start = backend.token_to_id("<|im_start|>")
    backend.post_processor = TemplateProcessing(single=["<|im_start|>", "$A"], special_tokens=[("<|im_start|>", start)])
    backend.save(str(path / "tokenizer.json"))
    tokenizer = Tokenizer.from_directory(path, {}, {})
    assert tokenizer.encode_prompt("a").count(start) == 1
    assert tokenizer.encode_prompt("<|im_start|>a").count(start) == 1


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_the_three_places_of_a_template(tmp_path: Path, place: str) -> None:
    FAMILIES["smollm"].write(tmp_path)
    path = tmp_path / place
    if path.suffix == ".jinja":
        path.write_text("from here")
    else:
        settings = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**settings, "chat_template": "from here"}))
    tokenizer = Tokenizer.from_directory(tmp_path, {}, {})
    assert tokenizer.decode(tokenizer.encode_chat([user("a")])) == "from here"
