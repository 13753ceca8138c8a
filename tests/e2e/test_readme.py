"""What the README tells a reader to type works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DEMO_MODEL = ".venv/models/SmolLM2-135M-Instruct.Q4_1.gguf"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def shell_examples() -> list[str]:
    """The example commands without their comments; chat needs a terminal and has tests of its own."""
    (block,) = [block for block in blocks("sh") if "onekernel generate" in block]
    lines = [line.partition("  #")[0].rstrip() for line in block.splitlines()]
    return [line for line in lines if "onekernel" in line and " chat " not in line]


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.slow
@pytest.mark.parametrize("command", shell_examples())
def test_a_command_works(command: str, smollm2_gguf: Path) -> None:
    if "generate" in command:
        command += " -n 12"  # as it stands there, only shorter
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**environment(), "M": str(smollm2_gguf)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_the_python_example_works(smollm2_gguf: Path) -> None:
    (code,) = blocks("python")
    assert DEMO_MODEL in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace(DEMO_MODEL, str(smollm2_gguf))],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage(prompt_tokens=" in done.stdout


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_command_it_names_exists() -> None:
    from onekernel.cli.main import build_parser

    named = set(re.findall(r"`?onekernel ([a-z]+)", README)) - {"is", "import"}
    assert {"generate", "chat", "bench", "info", "plan", "perplexity", "env"} <= named
    for command in named:
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args([command, "--help"])
        assert caught.value.code == 0
