"""The files of deploy/ that a machine can check without root or a container engine."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from onekernel.cli.main import main

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    text = (DEPLOY / "onekernel.service").read_text()
    command = re.findall(r"^ExecStart=(\S+) serve \$\{MODEL\} \$FLAGS$", text, re.MULTILINE)
    assert command == ["/opt/onekernel/bin/onekernel"]
    for protection in ("DynamicUser=yes", "ProtectSystem=strict", "NoNewPrivileges=yes", "CapabilityBoundingSet="):
        assert f"\n{protection}\n" in text
    if shutil.which("systemd-analyze"):
        unit = tmp_path / "onekernel.service"
        unit.write_text(text.replace(command[0], shutil.which("true") or "/bin/true"))
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_the_container_starts_a_command_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    entry = re.search(r'^ENTRYPOINT \["onekernel", (.*)\]$', text, re.MULTILINE)
    assert entry is not None
    flags = re.findall(r'"([^"]+)"', entry[1])
    with pytest.raises(SystemExit) as end:
        main([*flags, "--help"])
    assert end.value.code == 0
    assert "--host" in capsys.readouterr().out
    for source in re.search(r"^COPY (.*) /source/$", text, re.MULTILINE)[1].split():  # type: ignore[index]
        assert (DEPLOY.parent / source).exists()
