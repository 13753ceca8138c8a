"""A Hugging Face directory's tokenizer files -> vocabulary, named special tokens and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from onekernel.errors import ModelError
from onekernel.text.vocab import Vocab

_OTHER_FORMATS = ("tokenizer.model", "tekken.json", "tiktoken.model", "vocab.json", "vocab.txt")


def read_directory(directory: Path) -> Vocab:
    """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat template's files.

    As in transformers 5.x: tokenizer.json decides how text is split and whether a BOS is added; the other two files
    name the special tokens. Raises ModelError for a file that is missing, damaged or of an unsupported kind.
    """
    backend = _read_backend(directory)
    config = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read_json(directory / "special_tokens_map.json")
    try:
        return _assemble(directory, backend, config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{directory / 'tokenizer_config.json'} is not built as transformers writes it ({error!r}); fetch it again"
        ) from error


def _assemble(directory: Path, backend: Backend, config: Mapping[str, Any]) -> Vocab:
    special = {key: text for key, value in config.items() if key.endswith("_token") and (text := _content(value))}
    _add_missing_tokens(backend, config, special)
    if backend.post_processor is None and config.get("add_bos_token") is True and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, backend.token_to_id(bos))]
        )
    eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return Vocab(
        backend=backend,
        special_tokens=special,
        eos_token_ids=frozenset(() if eos is None else (eos,)),
        chat_templates=_read_templates(directory, config),
    )


def _read_backend(directory: Path) -> Backend:
    path = directory / "tokenizer.json"
    if not path.is_file():
        others = [name for name in _OTHER_FORMATS if (directory / name).exists()]
        if not others:
            raise ModelError(f"{path} is missing; fetch the model's tokenizer files too")
        raise ModelError(
            f"{path} is missing; {directory} has {' and '.join(others)}, which must be converted once: "
            "`pip install transformers sentencepiece protobuf tiktoken`, then in Python "
            f"`from transformers import AutoTokenizer; d = {str(directory)!r}; "
            "AutoTokenizer.from_pretrained(d).save_pretrained(d)`"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises no narrower type
        raise ModelError(
            f"{path} cannot be read as a tokenizer ({error}); fetch it again, or update the `tokenizers` package if "
            "the file is newer than it"
        ) from error
    # Files saved by training scripts may carry these; a prompt is never cut or padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _add_missing_tokens(backend: Backend, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Make every token that the settings call special one, and add those that tokenizer.json lacks."""
    decoder = config.get("added_tokens_decoder") or {}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for _, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            backend.add_tokens([AddedToken(**token)])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra_texts = map(_content, extra.values() if isinstance(extra, Mapping) else extra)
    names = {text for text in (*special.values(), *extra_texts) if text}
    kept = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    # Sorted, so that tokens new to the vocabulary get the same ids in every process.
    backend.add_special_tokens(
        [kept.get(text) or AddedToken(text, special=True, normalized=False) for text in sorted(names)]
    )


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return template sources by name: the .jinja files, else chat_template.json, else tokenizer_config.json."""
    templates = {path.stem: _read_text(path) for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    if (path := directory / "chat_template.jinja").is_file():
        templates["default"] = _read_text(path)
    if templates:
        return templates
    stored = _read_json(directory / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(stored, str):
        return {"default": stored}
    if isinstance(stored, Mapping):
        return dict(stored)
    return {entry["name"]: entry["template"] for entry in stored or ()}


def _content(value: Any) -> str | None:
    """Return a token's text from either of the two ways in which the files write it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read ({error}); fetch the file again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        parsed = json.loads(_read_text(path))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the file again") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} holds {type(parsed).__name__}, not a JSON object; fetch the file again")
    return parsed
