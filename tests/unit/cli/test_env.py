"""`env` works whatever is missing, and gives no secret away."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from onekernel import __version__
from onekernel.cli.main import main
from onekernel.env import VARIABLES


def test_it_shows_versions_host_and_every_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("ONEKERNEL_LOG", "info")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert main(["env", "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    assert found["installation"]["onekernel"] == __version__
    assert int(found["host"]["threads by default"]) >= 1
    assert set(found["environment"]) == {variable.name for variable in VARIABLES}
    assert found["environment"]["ONEKERNEL_LOG"] == "info"
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "(not set)"
    assert found["environment"]["HF_TOKEN"] == "(set, not shown)"
    assert "hf_secret" not in out


def test_for_people_it_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == ["installation:", "host:", "environment:"]
    assert any(line.split()[:2] == ["onekernel", __version__] for line in lines)


@pytest.mark.parametrize(
    "broken",
    ["sys.modules['torch'] = None", "sys.meta_path.insert(0, Broken())"],
    ids=["missing", "broken"],
)
def test_it_works_without_torch(broken: str) -> None:
    program = f"""
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise OSError("libtorch_cpu.so: undefined symbol")
{broken}
from onekernel.cli.main import main
sys.exit(main(["env", "--json"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["installation"]["torch build"].startswith("broken: ")
    assert found["installation"]["numpy"] != ""
    assert "memory available" in found["host"]
