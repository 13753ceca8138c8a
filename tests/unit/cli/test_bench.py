"""`bench` on a tiny random model: every format, and nothing but results on stdout."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from onekernel.cli.main import main
from tests.tiny_llama import write_tiny

FLAGS = "--load-format dummy --device cpu --dtype float32 -p 20,30 -n 3 -pg 8,2 -r 2 -t 1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("tiny")))


def bench(tiny: str, capsys: pytest.CaptureFixture[str], *extra: str) -> str:
    assert main(["bench", tiny, *FLAGS.split(), *extra]) == 0
    out, err = capsys.readouterr()
    assert "\r" not in err
    return out


def test_the_table_is_llama_benchs(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    header, rule, *rows = bench(tiny, capsys).splitlines()
    names = [cell.strip() for cell in header.strip("|").split("|")]
    assert names == [
        *("model", "size", "params", "backend", "device", "dtype", "threads", "test", "t/s", "TTFT ms", "GB/s"),
        *("us/token", "p50 us", "p99 us", "% of read"),
    ]
    assert set(rule) <= set("|-: ")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[names.index("test")] for row in cells] == ["pp20", "pp30", "tg3", "pp8+tg2"]
    for row in cells:
        mean, deviation = row[names.index("t/s")].split(" ± ")
        assert float(mean) > 0
        assert float(deviation) >= 0
        decode_only = row[names.index("test")] == "tg3"
        assert (row[names.index("GB/s")] != "") == decode_only
        assert (row[names.index("TTFT ms")] == "") == decode_only
        decodes = row[names.index("test")] in ("tg3", "pp8+tg2")
        assert all((row[names.index(name)] != "") == decodes for name in names[-4:])
    assert len(header) == len(rule)


def check(rows: list[dict[str, Any]]) -> None:
    assert [row["test"] for row in rows] == ["pp20", "pp30", "tg3", "pp8+tg2"]
    for row in rows:
        assert (row["backend"], row["device"], row["dtype"]) == ("reference", "cpu", "float32")
        assert int(row["n_threads"]) == 1
        assert float(row["avg_ts"]) > 0


def test_json_has_llama_benchs_keys(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(bench(tiny, capsys, "--json"))
    check(rows)
    for row in rows:
        assert len(row["samples_ts"]) == len(row["samples_ns"]) == 2
        tokens = row["n_prompt"] + row["n_gen"]
        assert row["samples_ts"][0] == pytest.approx(tokens / row["samples_ns"][0] * 1e9, rel=1e-3)
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
    [decode] = [row for row in rows if row["test"] == "tg3"]
    per_token = decode["weights_gbps"] * 1e9 / decode["avg_ts"]
    assert per_token == pytest.approx(decode["model_size"], rel=0.2)  # a tied embedding is read once, as the head


def test_json_lines_and_csv(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    check([json.loads(line) for line in bench(tiny, capsys, "-o", "jsonl").splitlines()])
    check(list(csv.DictReader(io.StringIO(bench(tiny, capsys, "-o", "csv")))))


def test_times_between_tokens_are_in_order_and_energy_needs_a_gpu(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {row["test"]: row for row in json.loads(bench(tiny, capsys, "--json"))}
    decode = rows["tg3"]
    assert 0 < decode["p50_us"] <= decode["p99_us"]
    assert decode["us_per_token"] < decode["p99_us"] * 1.0001
    share = decode["model_size"] / decode["read_gbps"] / 1e3 / decode["us_per_token"]
    assert decode["percent_of_read"] == pytest.approx(100 * share, rel=0.3)  # and the keys and values
    assert rows["pp20"]["us_per_token"] is None and decode["mj_per_token"] is None
    assert main(["bench", tiny, *FLAGS.split(), "--energy"]) == 1
    assert "energy is read from an NVIDIA GPU's counter, and the device is cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-r", "0"], "--repetitions is 0; it must be at least 1"),
        (["--json", "-o", "csv"], "--json and --output csv contradict each other"),
        (["-p", "0", "-n", "0"], "nothing is left to time"),
    ],
)
def test_what_cannot_be_timed_is_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "model", *flags]) == 2
    assert f"error: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("-p", "x"), ("-p", "-5,3"), ("-pg", "512"), ("-pg", "0,5"), ("-n", "")])
def test_a_list_of_another_form_is_a_usage_error(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", "model", f"{flag}={value}" if value.startswith("-") else flag, value])
    assert stop.value.code == 2
    capsys.readouterr()


@pytest.mark.slow
def test_a_shipped_configuration_needs_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--load-format dummy --device cpu -p 0 -n 1 -r 1 --no-warmup --json"
    assert main(["bench", "SmolLM2-135M", *flags.split()]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["model_n_params"] == 134_515_008
