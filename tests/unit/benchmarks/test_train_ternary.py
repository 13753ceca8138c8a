"""The training script: its arguments, and a few steps whose model runs as it was trained."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path

import pytest
import torch

from benchmarks import train_ternary
from benchmarks.train_ternary import END, Shape, Student, main, parse, read_texts, save, train_tokenizer
from onekernel import LLM, SamplingParams
from tests.unit.models.test_ternary import load, logits

WORDS = ["whale", "ship", "captain", "union", "congress", "people", "nation", "year", "peace", "war"]


def texts(folder: Path, count: int = 21) -> Path:
    dice = random.Random(0)
    folder.mkdir(exist_ok=True)
    for number in range(count):
        words = [dice.choice(WORDS) + str(dice.randrange(30)) for _ in range(80)]
        (folder / f"{number:03}.txt").write_text(" ".join(words) + ".")
    return folder


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_a_few_steps_give_a_packed_model_with_its_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    flags = "--vocab 320 --hidden 256 --layers 1 --length 64 --batch 2 --steps 3 --warm-up 1 --report 1 --device cpu"
    main([str(texts(tmp_path / "text")), "--out", str(out), *flags.split()])
    said = capsys.readouterr().out
    assert "20 texts" in said
    assert said.count("step ") == 3
    card = (out / "README.md").read_text()
    assert "- held out: 1 texts" in card
    assert "- perplexity there: " in card
    kept = json.loads((out / "held-out.json").read_text())
    assert kept["window"] == 64 and kept["perplexity"] > 1
    assert (out / "held-out.txt").read_text()[:20] == (tmp_path / "text" / "019.txt").read_text()[:20]
    with LLM(str(out), device="cpu") as llm:
        assert llm.loaded.config.ternary is not None
        assert llm.generate("the whale", SamplingParams(max_tokens=4)).usage.completion_tokens >= 1


def test_the_packed_model_computes_what_was_trained(tmp_path: Path) -> None:
    """In float32 its logits are the student's: names, norms, rotation and both quantisers agree."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer([path.read_text() for path in texts(tmp_path / "text").iterdir()], 320)
    config = Shape(320, 256, 2, 64).config
    student = Student(config)
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.2)
            if "_proj" not in name:
                parameter.copy_(parameter.to(torch.bfloat16))  # as they are saved
    save(student, tokenizer, config, tmp_path / "out")
    ids = list(range(10, 50))
    with torch.no_grad():
        want = student(torch.tensor([ids]))[0]
    got = logits(load(tmp_path / "out"), ids, (40,))
    assert (got - want).norm() < 6e-2 * want.norm()
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.8


def test_gradients_go_straight_through_both_quantisers() -> None:
    layer = train_ternary.TernaryLinear(8, 4, bias=False)
    x = torch.randn(3, 8, requires_grad=True)
    layer(x).sum().backward()
    scale = layer.weight.abs().mean()
    ternary = (layer.weight / scale).round().clamp(-1, 1) * scale
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert torch.allclose(x.grad, ternary.sum(0).expand(3, 8), atol=1e-6)
    step = x.detach().abs().amax(-1, keepdim=True) / 127
    assert torch.allclose(layer.weight.grad, ((x.detach() / step).round() * step).sum(0).expand(4, 8), atol=1e-5)


def test_texts_come_from_files_directories_and_the_archive(tmp_path: Path) -> None:
    folder = texts(tmp_path / "text", 2)
    with tarfile.open(tmp_path / "d.tgz", "w:gz") as archive:
        for name in (
            "package/sotu/data/1.txt",
            "package/moby-dick/data/chapter_1.txt",
            "package/moby-dick/data/data.txt",
            "package/spam-assassin/data/x.txt",
        ):
            info = tarfile.TarInfo(name)
            data = name.encode()
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    (tmp_path / "empty.txt").write_text(" \n")
    found = read_texts([folder, tmp_path / "d.tgz", folder / "000.txt", tmp_path / "empty.txt"])
    assert [text[:9] for text in found[2:4]] == ["package/m", "package/s"]
    assert found[4] == found[0]
    assert len(found) == 5


def test_a_tokenizer_covers_every_byte_and_its_end_is_0(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([path.read_text() for path in texts(tmp_path / "text", 3).iterdir()], 300)
    assert tokenizer.token_to_id(END) == 0
    assert tokenizer.decode(tokenizer.encode("Ünï → 7").ids) == "Ünï → 7"
    with pytest.raises(SystemExit, match="take more text"):
        train_tokenizer(["a b"], 400)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--minutes 0", "--minutes is 0.0"),
        ("--rate nan", "--rate is nan"),
        ("--epochs -1", "--epochs is -1.0"),
        ("--steps 0", "--steps is 0"),
        ("--warm-up 0", "--warm-up is 0"),
        ("--hidden 320", "--hidden is 320; it must be a multiple of 256"),
        ("--vocab 256", "--vocab is 256"),
        ("nowhere.txt", "there is no nowhere.txt"),
    ],
)
def test_wrong_arguments_are_named(
    flags: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        parse([str(tmp_path), *flags.split(), "--out", "out"])
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_model_is_not_overwritten_and_too_few_texts_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SystemExit):
        parse([str(tmp_path), "--out", str(tmp_path)])
    assert "holds a model" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="there are 3 texts; at least 20"):
        main([str(texts(tmp_path / "text", 3)), "--out", str(tmp_path / "out")])
