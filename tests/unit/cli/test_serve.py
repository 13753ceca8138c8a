"""`onekernel serve`: what its flags mean, what it says, what it refuses before anything is loaded."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onekernel.cli.main import build_parser, main
from onekernel.cli.serve import server_settings
from onekernel.errors import ConfigError
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings


def settings(*arguments: str, model: str = "org/name") -> ServerSettings:
    return server_settings(build_parser().parse_args(["serve", model, *arguments]), model)


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("", "model_names", ("org/name",)),
        ("--served-model-name a --served-model-name b", "model_names", ("a", "b")),
        ("--api-key s3cret", "api_key", "s3cret"),
        ("--cors-origin https://chat.example", "cors_origins", ("https://chat.example",)),
        ("", "cors_origins", ()),
        ("", "allowed_hosts", ("127.0.0.1", "localhost", "::1")),
        ("--allowed-host Box.Local", "allowed_hosts", ("127.0.0.1", "localhost", "::1", "box.local")),
        ("--host 0.0.0.0", "allowed_hosts", ()),
        ("--host 0.0.0.0 --allowed-host box", "allowed_hosts", ("box",)),
        ("--request-timeout 5", "request_timeout_s", 5.0),
        ("--shutdown-timeout 0", "shutdown_s", 0.0),
        ("--max-body-bytes 1000", "max_body_bytes", 1000),
        ("--max-choices 3", "max_choices", 3),
        ("--max-connections 10", "max_connections", 10),
    ],
)
def test_flags(arguments: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEKERNEL_API_KEY", raising=False)
    assert getattr(settings(*arguments.split()), field) == value


def test_the_key_may_come_from_the_environment_and_the_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEKERNEL_API_KEY", "from-env")
    assert settings().api_key == "from-env"
    assert settings("--api-key", "from-flag").api_key == "from-flag"


def test_a_path_is_not_told_to_clients(tmp_path: Path) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    file = tmp_path / "small.Q4_1.gguf"
    file.touch()
    assert settings(model=str(folder)).model_names == ("My-Model",)
    assert settings(model=f"{folder}/").model_names == ("My-Model",)
    assert settings(model=str(file)).model_names == ("small.Q4_1",)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("--port 70000", "--port is 70000"),
        ("--request-timeout 0", "--request-timeout is 0.0"),
        ("--max-choices 0", "--max-choices is 0"),
        ("--served-model-name=", "--served-model-name is ('',)"),
        ("--api-key=", "the API key is empty"),
        ("--slice-tokens 0", "--slice-tokens is 0"),
        ("--host no.such.host.invalid", "cannot listen on no.such.host.invalid, port 8000"),
    ],
)
def test_wrong_flags_are_usage_errors(arguments: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "model", *arguments.split()]) == 2
    assert named in capsys.readouterr().err


def test_a_port_in_use_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "model", "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in capsys.readouterr().err


def test_it_listens_first_and_warns_of_an_open_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Any] = []

    def serve(load: Callable[[], Any], service: Service, listener: socket.socket, note: Callable[[str], None]) -> int:
        served.append((service, listener.getsockname()))
        listener.close()
        with pytest.raises(ConfigError):
            load()  # there is no such model; only now is it looked for
        return 7

    monkeypatch.setattr("onekernel.server.process.serve", serve)
    monkeypatch.setattr("onekernel.cli.session.open_llm", _no_model)
    monkeypatch.delenv("ONEKERNEL_API_KEY", raising=False)
    assert main(["serve", "org/name", "--port", "0"]) == 7
    assert "anybody" not in capsys.readouterr().err
    assert main(["serve", "org/name", "--port", "0", "--host", "0.0.0.0"]) == 7
    told = capsys.readouterr().err
    assert "anybody who reaches this port can use the model" in told
    port = served[-1][1][1]
    assert f"listening on http://0.0.0.0:{port}, loading org/name" in told
    assert main(["serve", "org/name", "--port", "0", "--host", "0.0.0.0", "--api-key", "k"]) == 7
    assert "anybody" not in capsys.readouterr().err


def _no_model(*arguments: object) -> None:
    raise ConfigError("no such model")
