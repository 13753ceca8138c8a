"""The table of who waited for what."""

from __future__ import annotations

import pytest
import torch

from onekernel.device.watch import WAITS, Watch
from onekernel.errors import DeviceError

CPU = torch.device("cpu")
EXPIRED = 1 << 32


def test_a_launch_that_was_not_stopped_passes() -> None:
    Watch.create(CPU, 2, 64).check("ring")


def test_causes_stand_first() -> None:
    watch = Watch.create(CPU, ctas=2, threads=64)
    watch.records[0, 1] = torch.tensor([2, 5, 1, 0])
    watch.records[1, 0] = torch.tensor([3 | EXPIRED, 17, 8, 6])
    watch.stop()
    with pytest.raises(DeviceError) as caught:
        watch.check("ring")
    assert str(caught.value).splitlines() == [
        "kernel ring was stopped before its end",
        "  CTA 1 warp 0 waited for value 17: expected 8, saw 6, gave up",
        "  CTA 0 warp 1 waited for ring stage 5 to be freed: expected 1, saw 0, was told to stop",
    ]


def test_a_long_table_is_cut() -> None:
    watch = Watch.create(CPU, ctas=3, threads=32 * 9)
    watch.records[..., 0] = 1
    watch.stop()
    with pytest.raises(DeviceError, match="and 7 more"):
        watch.check("ring")


@pytest.mark.parametrize("kind", WAITS)
def test_every_wait_has_words(kind: int) -> None:
    watch = Watch.create(CPU, 1, 32)
    watch.records[0, 0] = torch.tensor([kind, 42, 0, 0])
    [wait] = watch.waited()
    assert "42" in wait.what
