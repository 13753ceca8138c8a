"""The sparse benchmarks: patterns have the statistics they claim, and rows have what the results' format asks for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import sparse, train_sparse
from benchmarks.energy import counter_if_any, millijoules_per_call
from benchmarks.sparse_patterns import Pattern, iid, skew

TOKENS, INNER, HIDDEN = 1024, 5632, 128


def active(pattern: Pattern) -> torch.Tensor:
    x, gate = pattern.inputs(HIDDEN, "cpu")
    return F.linear(x.float(), gate.float()).bfloat16() > 0


@pytest.mark.parametrize("fraction", [0.005, 0.5])
def test_iid_neurons_are_equally_often_active(fraction: float) -> None:
    found = active(iid(fraction, TOKENS, INNER))
    assert found.float().mean() == pytest.approx(fraction, rel=0.1)  # 126 columns make shorter tails than 2,046
    counts = found.sum(0).sort(descending=True)[0].double()
    assert counts[: INNER // 10].sum() / counts.sum() < 0.25
    assert found.sum(1).max() < 2.0 * fraction * INNER


@pytest.mark.parametrize(("fraction", "seed"), [(0.005, 0), (0.01, 1), (0.02, 0)])
def test_a_tenth_of_skewed_neurons_holds_most_nonzeros(fraction: float, seed: int) -> None:
    found = active(skew(fraction, seed, TOKENS, INNER))
    assert found.float().mean() == pytest.approx(fraction, rel=0.1)
    counts = found.sum(0).sort(descending=True)[0].double()
    assert 0.65 < counts[: INNER // 10].sum() / counts.sum() < 0.75
    rows = found.sum(1).double()
    assert rows.max() > 3 * rows.mean()


def test_rates_are_log_normal() -> None:
    """Of neurons exactly, by construction; of tokens nearly."""
    pattern = skew(0.01, 0, 20_000, INNER)
    scale = (1 + 0.25**2) ** 0.5
    logs = torch.special.ndtr(pattern.neurons.double() / scale).log()
    assert float(logs.std()) == pytest.approx(1.806, rel=0.02)
    assert float(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) == pytest.approx(0, abs=0.05)
    tokens = torch.special.ndtr(pattern.neurons[None, ::16] + pattern.tokens[:4000, None]).mean(1).log()
    assert 0.4 < float(tokens.std()) < 0.9
    assert float(((tokens - tokens.mean()) ** 3).mean() / tokens.std() ** 3) == pytest.approx(0, abs=0.4)


def test_seeds_place_the_hot_neurons_elsewhere() -> None:
    first, again, other = skew(0.01, 0, 8, INNER), skew(0.01, 0, 8, INNER), skew(0.01, 1, 8, INNER)
    assert torch.equal(first.neurons, again.neurons)
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.neurons, other.neurons)


def test_even_half_of_all_values_can_be_skewed() -> None:
    assert active(skew(0.5, 0, 512, INNER)).float().mean() == pytest.approx(0.5, rel=0.05)


def test_without_a_counter_there_is_no_energy() -> None:
    assert counter_if_any("cuda:0", "GPU-none") is None
    assert millijoules_per_call(None, lambda: None, 3) is None
    used = iter([100.0, 160.0])
    assert millijoules_per_call(lambda: next(used), lambda: None, 3) == 20.0


def test_unknown_kinds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sparse.main(["--kinds", "layers,decode"])
    assert "--kinds has decode; it takes layers and model" in capsys.readouterr().err


def test_a_bit_packed_mask_holds_the_activity() -> None:
    found = torch.rand(3, 16) < 0.5
    packed = train_sparse.pack_bits(found)
    assert packed.shape == (3, 2)
    assert [[int(packed[t, n // 8]) >> n % 8 & 1 for n in range(16)] for t in range(3)] == found.int().tolist()


@pytest.mark.slow
def test_training_and_benchmark_run_on_a_cpu_and_write_their_rows(tmp_path: Path) -> None:
    real, mask = tmp_path / "real.pt", tmp_path / "mask.bin"
    log = tmp_path / "training.json"
    train_sparse.main(["--tiny", "--out", str(real), "--mask", str(mask), "--results", str(log), "--commit", "abc"])
    layers = json.loads(log.read_text())["rows"]
    assert [row["layer"] for row in layers] == [0, 1]
    assert all(0.2 < row["nonzero_fraction"] < 0.8 and row["steps"] == 3 for row in layers)
    assert mask.stat().st_size == 32 * 96 // 8

    out = tmp_path / "sparse.json"
    sparse.main(["--cpu", "--real", str(real), "--out", str(out), "--commit", "abc"])
    document = json.loads(out.read_text())
    assert document["commit"] == "abc"
    rows = document["rows"]
    assert [(row["kind"], row["pattern"]) for row in rows] == [
        ("batched", "real"),
        *[("batched", "skew"), ("batched", "iid")] * 2,
        ("decode", "skew"),
        ("decode", "iid"),
        *[("model", "skew")] * 2,
    ]
    for row in rows:
        assert {"hidden_size", "intermediate_size", "tokens", "nonzero_fraction", "route", "mj_per_token"} <= set(row)
        assert row["relative_error"] < 0.01
        assert row["us"]["repeats"] == row["dense_us"]["repeats"] == 2
        assert row["speedup"] == pytest.approx(row["dense_us"]["median"] / row["us"]["median"])
        assert row["mj_per_token"] is None
