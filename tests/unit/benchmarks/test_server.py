"""The server's benchmark: its arguments, how it reads an event stream, and its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.server import Seen, Sides, parse, rows_of_others
from benchmarks.server_client import read


def test_the_default_measures_every_kind_with_one_client_and_with_eight() -> None:
    args = parse([])
    assert (args.kinds, args.clients, args.device) == (["instant", "paced", "model"], [1, 8], "cpu")


@pytest.mark.parametrize("wrong", [["--new", "1"], ["--clients", "0"], ["--kinds", "fast"], ["--repeats", "0"]])
def test_wrong_arguments_end_the_program(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)


def event(text: str, **members: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}], **members}).encode() + b"\n\n"


def test_an_answer_s_times_are_those_of_the_pieces_that_brought_its_text() -> None:
    end = event("", timings={"predicted_n": 5}) + b"data: [DONE]\n\n"
    stream = [b": waiting\n\n", event("a"), event("b") + event("c")[:9], event("c")[9:], event("d"), end]
    seen = read(10.0, [(11.0 + index, piece) for index, piece in enumerate(stream)])
    assert seen == {"us_per_token": 3 / 4 * 1e6, "whole_us": 5 / 5 * 1e6, "ttft_ms": 2000.0, "tokens": 5}


@pytest.mark.parametrize("stream", [event("a"), event("a") + b'data: {"error": {"message": "broken"}}\n\n'])
def test_an_answer_that_is_not_whole_is_an_error(stream: bytes) -> None:
    with pytest.raises(ValueError):
        read(0.0, [(1.0, stream)])


def test_a_row_has_both_sides_and_their_difference() -> None:
    sides = Sides([Seen(10, 1, 5), Seen(12, 2, 5)], [Seen(15, 4, 6), Seen(17, 5, 6)], ["cut off"])
    row = sides.row("paced", clients=2)
    assert (row["kind"], row["clients"], row["errors"], row["overhead_us"]) == ("paced", 2, 1, 5)
    assert (row["us_per_token"]["median"], row["engine_us_per_token"]["median"]) == (16, 11)
    assert (row["ttft_ms"]["median"], row["engine_ttft_ms"]["median"]) == (6, 5)
    assert sides.row("instant", clients=2)["overhead_us"] == 3


def test_rows_of_another_device_stay(tmp_path: Path) -> None:
    path = tmp_path / "server.json"
    assert rows_of_others(path, "CPU") == []
    path.write_text(json.dumps({"rows": [{"device": "CPU", "clients": 1}, {"device": "NVIDIA H200", "clients": 8}]}))
    assert rows_of_others(path, "CPU") == [{"device": "NVIDIA H200", "clients": 8}]
