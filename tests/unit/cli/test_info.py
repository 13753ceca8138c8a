"""`info` reads headers and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from onekernel.cli.main import main
from tests.tiny_llama import CONFIG, write_tiny

DUMMY = "--load-format dummy --device cpu"


def test_the_figures_of_a_published_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "Llama-3.2-1B", "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 1_235_814_400
    assert (found["stored_bytes"], found["stored_types"]) == (None, {})
    assert found["dtype"] == "bfloat16"
    assert found["memory_bytes"] == 2 * 1_235_814_400
    # All matrices, the tied embedding once as the head; one embedding row and the last norm are small.
    assert found["weight_bytes_per_token"] == pytest.approx(2 * 1_235_814_400, rel=1e-4)
    assert found["kv_bytes_per_token"] == 16 * 2 * 8 * 64 * 2
    assert found["context_limit"] == 131_072
    assert found["config"]["rope_scaling"]["kind"] == "llama3"
    limit = found["read_gbps"] * 1e9 / found["weight_bytes_per_token"]
    assert found["limit_tokens_per_s"] == pytest.approx(limit)
    assert 0 < found["limit_tokens_per_s_full_context"] < limit


def test_for_people_it_is_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(write_tiny(tmp_path)), *DUMMY.split()]) == 0
    out = capsys.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["dimensions"].startswith("2 layers, hidden 64, intermediate 128, 4 heads, 2 KV heads of 16")
    assert lines["context"].startswith("2048 tokens")
    assert "tok/s on cpu reading" in lines["limit"]
    assert "\nin the files   no weights here\n" in out


def test_no_weights_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One tensor of the model is there; loading would refuse the rest that is missing."""
    from safetensors.torch import save_file

    write_tiny(tmp_path, vocab_size=100, eos_token_id=2)
    hidden = CONFIG["hidden_size"]
    save_file({"model.norm.weight": torch.ones(hidden)}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_text(json.dumps(word_level()))
    assert main(["info", str(tmp_path), "--device", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stored_types"] == {"F32": 1}
    assert found["stored_bytes"] == 4 * hidden
    assert found["eos_token_ids"] == [2]
    assert found["chat_template"] is False
    assert found["thinking_tags"] is None


def word_level() -> dict[str, object]:
    vocab = {f"w{number}": number for number in range(100)}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }


def test_a_missing_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "/no/such/model"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1
