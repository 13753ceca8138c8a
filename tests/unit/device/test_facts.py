"""Facts of a GPU, and one sentence for every one that the kernels do not run on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from onekernel.device import driver as driver_module
from onekernel.device.describe import describe, gpu_rows
from onekernel.device.driver import check, current, driver, initialise, is_current
from onekernel.device.facts import DeviceFacts, device_index, driver_version, facts
from onekernel.device.resolve import ResolvedDevice, resolve_device
from onekernel.device.support import (
    ARCHITECTURES,
    OPERATOR_ARCHITECTURES,
    architecture,
    check_operator,
    check_supported,
)
from onekernel.errors import ConfigError, DeviceError
from tests.unit.device.fakes import FakeDriver, gpu


def test_facts_are_read_from_the_driver() -> None:
    found = facts("cuda", FakeDriver(name=b"NVIDIA H100 80GB HBM3", MULTIPROCESSOR_COUNT=114, version=12080))
    assert (found.name, found.capability, found.sm, found.sm_count) == ("NVIDIA H100 80GB HBM3", (9, 0), "sm_90", 114)
    assert found.shared_bytes_per_block == 232_448
    assert found.cuda_version == (12, 8)
    assert not found.mig
    assert found.uuid == "GPU-00000000-0000-0000-0000-000000000000"


def test_a_mig_slice_counts_its_own_sms_and_is_supported() -> None:
    found = facts("cuda", FakeDriver(name=b"NVIDIA H200 MIG 3g.71gb", MULTIPROCESSOR_COUNT=60))
    assert found.mig
    assert found.uuid.startswith("MIG-")
    check_supported(found, 13)
    assert ("cuda:0 SMs", "60 (a MIG slice)") in gpu_rows(found)


def test_a_device_is_chosen_by_number() -> None:
    assert facts("cuda:1", FakeDriver(count=2)).index == 1
    with pytest.raises(DeviceError, match=r"cuda:2 does not exist: this process sees 2 GPU\(s\), cuda:0 to cuda:1"):
        facts("cuda:2", FakeDriver(count=2))


@pytest.mark.parametrize("word", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", ""])
def test_another_word_is_a_usage_error(word: str) -> None:
    with pytest.raises(ConfigError, match="it must be auto, cpu, cuda or cuda:N"):
        device_index(word)


def test_the_driver_version_comes_from_its_module(tmp_path: Path) -> None:
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build\nGCC 12.2.0\n")
    assert driver_version(path) == "580.82.07"
    assert driver_version(tmp_path / "none") == "unknown"


@pytest.mark.complaint(
    "D2",
    file="device/driver.py",
    old='raise DeviceError("no NVIDIA driver found (libcuda.so.1); use --device cpu") from None',
    new="raise",
)
def test_no_driver_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module.ctypes, "CDLL", missing)
    with pytest.raises(DeviceError) as caught:
        driver.__wrapped__()
    assert str(caught.value) == "no NVIDIA driver found (libcuda.so.1); use --device cpu"


@pytest.mark.parametrize(("visible", "shown"), [("", "empty or not set"), ("7", "7")])
def test_hidden_gpus_are_explained(monkeypatch: pytest.MonkeyPatch, visible: str, shown: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(
        DeviceError, match=f"the NVIDIA driver sees no GPU .CUDA_VISIBLE_DEVICES is {shown}.; use --dev"
    ):
        initialise(FakeDriver(init_status=100))


def test_a_driver_that_fails_is_named() -> None:
    with pytest.raises(
        DeviceError, match="initialising the NVIDIA driver failed with CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
    ):
        initialise(FakeDriver(init_status=803))


@pytest.mark.complaint("E1", file="device/driver.py", old="if status in _CONTEXT_LOST:", new="if status < 0:")
@pytest.mark.parametrize(("status", "lost"), [(700, True), (719, True), (214, True), (1, False), (2, False)])
def test_a_lost_context_is_told_apart(status: int, lost: bool) -> None:
    with pytest.raises(DeviceError, match="running failed with CUDA_ERROR") as caught:
        check((status,), "running", FakeDriver())
    assert caught.value.context_lost is lost
    assert ("restart it" in str(caught.value)) is lost


def test_a_context_is_left_even_after_an_error() -> None:
    cuda = FakeDriver()
    assert is_current(1, cuda)
    assert not is_current(2, cuda)
    with pytest.raises(ValueError, match="inside"), current(2, cuda):
        raise ValueError("inside")
    assert cuda.calls == [("push", 2), ("pop", None)]


REFUSED: dict[str, tuple[DeviceFacts, int, str]] = {
    "old GPU": (
        gpu(name="NVIDIA A100", capability=(8, 0)),
        13,
        r"capability 8.0 \(sm_80\); the kernels need one of 9.0, ",
    ),
    "unknown GPU": (gpu(capability=(11, 0)), 13, r"capability 11.0 \(sm_110\)"),
    "old driver": (
        gpu(driver_version="550.54.15", cuda_version=(12, 4)),
        13,
        "driver 550.54.15, which runs CUDA 12.4; kernels compiled with CUDA 13 need driver 580.65.06 or newer",
    ),
    "very old driver": (
        gpu(cuda_version=(11, 8)),
        12,
        "CUDA 11.8; kernels compiled with CUDA 12 need driver 525.60.13",
    ),
    "watchdog": (gpu(exec_timeout=True), 13, r"a display watchdog \(KERNEL_EXEC_TIMEOUT\); .* needs a GPU without a"),
    "no cooperative launch": (gpu(cooperative=False), 13, "does not support cooperative launches; CTAs that wait"),
    "prohibited": (gpu(prohibited=True), 13, "in compute mode 'prohibited'; it must let a process in"),
}


@pytest.mark.complaint("D3", file="device/support.py", old="    if arch is None:", new='    if arch == "":')
@pytest.mark.parametrize("case", REFUSED)
def test_each_refusal_is_one_sentence(case: str) -> None:
    found, major, words = REFUSED[case]
    with pytest.raises(DeviceError, match=words) as caught:
        check_supported(found, major)
    message = str(caught.value)
    assert message.startswith(f"cuda:0 ({found.name}) ")
    assert message.endswith("; use --backend reference, which needs no kernel of this package, or --device cpu")
    assert "\n" not in message


def test_supported_gpus_get_their_architecture() -> None:
    for capability, arch in ARCHITECTURES.items():
        found = gpu(capability=capability)
        check_supported(found, 13)
        assert architecture(found) == arch
    check_supported(gpu(cuda_version=(12, 4)), 12)
    check_supported(gpu(cuda_version=(13, 3)), 12)


def test_operators_run_on_older_gpus_and_beside_a_display() -> None:
    for capability, arch in OPERATOR_ARCHITECTURES.items():
        found = gpu(capability=capability, exec_timeout=True, cooperative=False)
        check_operator(found, 13)
        assert architecture(found, OPERATOR_ARCHITECTURES) == arch
    for found, words in (
        (gpu(capability=(7, 5)), r"capability 7.5 \(sm_75\); the kernels need one of 8.0, 8.6, 8.9, 9.0"),
        (gpu(cuda_version=(12, 4)), "runs CUDA 12.4"),
        (gpu(prohibited=True), "prohibited"),
    ):
        with pytest.raises(DeviceError, match=words):
            check_operator(found, 13)


def with_torch_for(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)


def reading(found: DeviceFacts) -> Callable[[str], DeviceFacts]:
    return lambda device: gpu(
        **{**{name: getattr(found, name) for name in found.__slots__}, "index": device_index(device)}
    )


def failing(message: str) -> Callable[[str], DeviceFacts]:
    def read(device: str) -> DeviceFacts:
        raise DeviceError(message)

    return read


def test_auto_takes_a_supported_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_torch_for(monkeypatch, "13.0")
    assert resolve_device("auto", reading(gpu())) == ResolvedDevice("cuda:0", "NVIDIA H200, sm_90, 132 SMs, 140 GiB")


@pytest.mark.parametrize(
    ("read", "torch_cuda", "reason"),
    [
        (
            failing("no NVIDIA driver found (libcuda.so.1); use --device cpu"),
            "13.0",
            "no NVIDIA driver found (libcuda.so.1)",
        ),
        (reading(gpu(capability=(8, 0))), "13.0", "cuda:0 (NVIDIA H200) has compute capability 8.0 (sm_80)"),
        (reading(gpu()), None, f"torch {torch.__version__} is built without CUDA"),
        (reading(gpu(cuda_version=(12, 4))), "13.0", f"torch {torch.__version__} needs a driver for CUDA 13, driver "),
    ],
)
def test_auto_falls_back_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, read: Any, torch_cuda: str | None, reason: str
) -> None:
    with_torch_for(monkeypatch, torch_cuda)
    resolved = resolve_device("auto", read)
    assert resolved.device == "cpu"
    assert resolved.reason.startswith(reason)
    assert resolved.reason.endswith("; running on the CPU")


def test_a_named_device_is_taken_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("cpu", failing("must not be read")) == ResolvedDevice("cpu", "asked for")
    with_torch_for(monkeypatch, "13.0")
    assert resolve_device("cuda", reading(gpu())).device == "cuda:0"
    assert resolve_device("cuda:1", reading(gpu())).device == "cuda:1"
    assert resolve_device("cuda", reading(gpu(capability=(8, 0)))).device == "cuda:0", "torch itself runs there"
    with pytest.raises(DeviceError, match="use --device cpu"):
        resolve_device("cuda", failing("no NVIDIA driver found (libcuda.so.1); use --device cpu"))
    with pytest.raises(ConfigError, match="'tpu'"):
        resolve_device("tpu", reading(gpu()))
    with_torch_for(monkeypatch, None)
    with pytest.raises(DeviceError, match="built without CUDA; install a CUDA build or use --device cpu"):
        resolve_device("cuda", reading(gpu()))


def test_everything_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(driver_module.ctypes, "CDLL", missing)
    driver.cache_clear()
    rows = dict(describe())
    assert rows["GPU"] == "no NVIDIA driver found (libcuda.so.1); use --device cpu"
    assert rows["compiler"].startswith("nvrtc 1")
    assert rows["minimum driver"] == "580.65.06 (CUDA 13.0)"
    assert rows["kernel cache holds"].endswith(" MiB")
    assert rows["torch"].startswith("2.")


def test_a_gpu_is_described_with_the_verdict() -> None:
    rows = dict(gpu_rows(gpu()))
    assert rows["cuda:0 compute capability"] == "9.0 (sm_90)"
    assert rows["cuda:0 shared memory"] == "232448 bytes per CTA, 233472 bytes per SM"
    assert rows["cuda:0 launches"] == "cooperative yes, clusters yes, watchdog (KERNEL_EXEC_TIMEOUT) no"
    assert rows["cuda:0 kernels"] == "supported"
    assert dict(gpu_rows(gpu(capability=(7, 5))))["cuda:0 kernels"].startswith(
        "not supported: cuda:0 (NVIDIA H200) has"
    )
