"""`plan` shows the plan that would run, without weights and without a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onekernel.cli.main import main
from onekernel.models.registry import model_config
from onekernel.plan.limits import Limits
from onekernel.plan.plan import make_plan
from onekernel.plan.prediction import H200, predict_us
from onekernel.weights.shipped import read_shipped
from tests.tiny_llama import CONFIG, write_tiny


def test_json_has_every_phase_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--json", "--ctx-size", "2048", "--read-gbps", "4000", "--hand-over-us", "1.5"]
    assert main(["plan", "Llama-3.2-1B", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = make_plan(model_config(read_shipped("Llama-3.2-1B")), Limits(ctas=132, max_context=2048, num_pages=32))
    assert (found["ctas"], found["context_tokens"], len(found["phases"])) == (132, 2048, 6 * 16 + 3)
    assert found["bytes_per_token"] == plan.bytes_per_token == sum(phase["bytes"] for phase in found["phases"])
    assert found["imbalance"] == plan.imbalance
    assert found["ring_stages"] == plan.shared.stages
    assert (found["hand_overs"], found["read_gbps"], found["hand_over_us"], found["position"]) == (82, 4000, 1.5, 127)
    assert found["predicted_us"] == predict_us(plan, 127, replace(H200, read_gbps=4000.0, hand_over_us=1.5))
    down = next(phase for phase in found["phases"] if phase["kind"] == "down")
    assert down == {"kind": "down", "layer": 0, "bytes": 2048 * 8192 * 2, "least_bytes": 131072, "most_bytes": 262144}


@pytest.mark.parametrize(("flags", "position"), [([], 99), (["--position", "5"], 5)])
def test_the_position_is_one_that_the_context_has(
    flags: list[str], position: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["plan", str(write_tiny(tmp_path)), "--ctas", "4", "--ctx-size", "100"]
    assert main([*arguments, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["position"] == position
    assert main([*arguments, *flags]) == 0
    shown = f"{found['predicted_us']:.0f} us per token after {position} others, at {H200.read_gbps:g} GB/s"
    assert shown in capsys.readouterr().out


def test_for_people_it_is_a_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["plan", str(write_tiny(tmp_path)), "--ctas", "4", "--validate"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "4 CTAs of 12 + 1 warps" in lines[1]
    kinds = [line.split()[:2] for line in lines[lines.index("") + 2 :]]
    assert kinds == [["embed", "1"], *([kind, "2"] for kind in PER_LAYER), ["head", "1"], ["choose", "1"]]
    assert "the plan is sound" in err


def test_a_relu_gate_makes_the_feed_forwards_sparse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = read_shipped("Llama-3.2-1B") | {"hidden_act": "relu"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def plan(*flags: str) -> dict[str, Any]:
        assert main(["plan", str(tmp_path), "--device", "cpu", "--ctx-size", "512", "--json", *flags]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    assumed, few, dense = plan(), plan("--active-fraction", "0.01"), plan("--dense")
    assert (assumed["active_fraction"], few["active_fraction"], dense["active_fraction"]) == (0.05, 0.01, None)
    assert few["bytes_per_token"] < assumed["bytes_per_token"] < 0.6 * dense["bytes_per_token"]
    assert {"gate", "gather"} < {phase["kind"] for phase in few["phases"]}
    assert main(["plan", str(tmp_path), "--device", "cpu", "--ctx-size", "512"]) == 0
    assert "if 5 % of the neurons fire" in capsys.readouterr().out
    assert main(["plan", str(tmp_path), "--device", "cpu", "--dense", "--active-fraction", "0.5"]) == 2
    assert "--dense reads all neurons" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "flags", "reason"),
    [
        (CONFIG | {"hidden_act": "relu"}, [], "128 neurons in tiles of 8 are too few for 132 CTAs, each of which must"),
        (CONFIG | {"hidden_act": "relu"}, ["--sequences", "8"], "they take one sequence, and 8 were asked for"),
        (CONFIG | {"hidden_act": "relu", "mlp_bias": True}, [], "the feed-forwards have biases"),
        (CONFIG | {"hidden_act": "relu"}, ["--dense"], None),
        (CONFIG | {"hidden_act": "relu"}, ["--ctas", "4"], None),
        (CONFIG, [], None),
    ],
)
def test_a_relu_gate_with_dense_feed_forwards_says_why(
    config: dict[str, Any], flags: list[str], reason: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["plan", str(tmp_path), "--device", "cpu", "--ctx-size", "512", *flags]
    assert main(arguments) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("feed-forwards ")]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["why_dense"]
    if reason is None:
        assert (told, found) == ([], None)
    else:
        assert reason in found
        assert "plan" not in found
        assert told == [f"feed-forwards  dense: {found}"]


PER_LAYER = ["qkv", "attention", "combine", "out", "gate_up", "down"]


def test_eight_sequences_take_the_warps_that_the_kernel_is_built_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "Llama-3.2-1B", "--device", "cpu", "--sequences", "8", "--ctas", "132", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequences"] == 8 and found["ring_stages"] >= 4
    assert main(["plan", "Llama-3.2-1B", "--device", "cpu", "--sequences", "8"]) == 0
    assert "132 CTAs of 8 + 1 warps" in capsys.readouterr().out


def test_a_model_for_which_shared_memory_is_too_small_is_refused_with_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(tmp_path, intermediate_size=1 << 20)
    assert main(["plan", str(tmp_path)]) == 2
    assert "1 sequences of 1048576 inputs; at least 4 are needed: use fewer sequences" in capsys.readouterr().err


def test_a_gguf_file_is_planned_from_its_header(capsys: pytest.CaptureFixture[str], smollm2_gguf: Path) -> None:
    assert main(["plan", str(smollm2_gguf), "--ctas", "78", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["phases"]) == 6 * 30 + 3
    assert found["imbalance"] < 1.03


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ctas", "0"], "ctas is 0; it must be at least 1"),
        (["--ctas", "100000"], "ctas is 100000; it must be at most 256"),
        (["--sequences", "3"], "sequences is 3; a kernel is built for 1 or 8"),
        (["--read-gbps", "0"], "--read-gbps is 0.0"),
        (["--read-gbps", "inf", "--json"], "--read-gbps is inf"),
        (["--hand-over-us", "nan"], "--hand-over-us is nan"),
        (["--hand-over-us", "-1"], "--hand-over-us is -1.0; give a positive number"),
        (["--position", "-1"], "--position is -1"),
        (["--position", "512", "--ctx-size", "512"], "with a context of 512 tokens give 0 to 511"),
        (["--ctx-size", "999999999"], "the model allows 131072"),
    ],
)
def test_a_wrong_value_is_a_usage_error(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "Llama-3.2-1B", *arguments]) == 2
    assert message in capsys.readouterr().err
