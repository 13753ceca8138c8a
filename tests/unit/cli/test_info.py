"""`info` reads headers and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from onekernel.cli.main import main
from tests import oracle
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


def relu_model(folder: Path) -> torch.Tensor:
    """Write a model with a tokenizer of words and a text of 40; return (layers, tokens) active, as transformers has it.

    Every seventh neuron of the first layer has a gate of zeros.
    """
    model = oracle.make("llama", folder, hidden_act="relu", vocab_size=100)
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight[::7] = 0
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(word_level()))
    ids = [(number * number) % 100 for number in range(40)]
    (folder / "text.txt").write_text(" ".join(f"w{number}" for number in ids))
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.act_fn = type(layer.mlp.act_fn)()  # transformers may share one between layers
        layer.mlp.act_fn.register_forward_hook(lambda module, x, y: found.append((y[0] != 0).sum(-1)))
    oracle.logits(model, ids)
    return torch.stack(found)


def test_active_neurons_are_those_that_transformers_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    want = relu_model(tmp_path)
    flags = ["--neurons", "--text", str(tmp_path / "text.txt"), "--device", "cpu", "--dtype", "float32"]
    assert main(["info", str(tmp_path), *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["hidden_act"] == "relu"
    told = found["neurons"]
    assert (told["tokens"], told["intermediate_size"]) == (40, 176)
    assert [layer["layer"] for layer in told["layers"]] == [0, 1, 2]
    for layer, by_token in zip(told["layers"], want, strict=True):
        assert layer["mean"] == pytest.approx(float(by_token.double().mean()), abs=0.1)  # sums have another order
        assert layer["most"] == pytest.approx(int(by_token.max()), abs=1)
        assert layer["percent"] == pytest.approx(100 * layer["mean"] / 176)
    assert [layer["never"] >= 26 for layer in told["layers"]] == [True, False, False]  # a seventh

    assert main(["info", str(tmp_path), *flags, "-c", "16"]) == 0
    out, err = capsys.readouterr()
    assert f"only the first 16 tokens of {tmp_path / 'text.txt'} are read" in err
    first = out.splitlines()[-4].split()
    assert first[0] == "0"
    assert float(first[1]) == pytest.approx(float(want[0, :16].double().mean()), abs=0.1)
    assert out.splitlines()[-1].split()[0] == "all"


def test_the_neurons_of_a_dummy_are_counted_on_random_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path, hidden_act="relu2", max_position_embeddings=700)
    assert main(["info", str(tmp_path), *DUMMY.split(), "--neurons"]) == 0
    out = capsys.readouterr().out
    assert "while reading 512 tokens of random tokens:" in out
    assert [line.split()[0] for line in out.splitlines()[-3:]] == ["0", "1", "all"]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--neurons"], 1, "the activation silu, which is never exactly zero: all 128 neurons"),
        (["--text", "text.txt"], 2, "--text is for the text that --neurons reads; add --neurons"),
        (["-c", "9"], 2, "--ctx-size is for the text that --neurons reads; add --neurons"),
    ],
)
def test_where_neurons_cannot_be_counted(
    flags: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", str(write_tiny(tmp_path)), *DUMMY.split(), *flags]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and message in err


def test_an_empty_text_has_no_neurons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    write_tiny(tmp_path, hidden_act="relu")
    flags = ["--neurons", "--text", str(tmp_path / "empty.txt")]
    assert main(["info", str(tmp_path), *DUMMY.split(), *flags]) == 2
    assert "empty.txt is empty" in capsys.readouterr().err
