"""Tests on a real GPU: skipped, with the reason, where there is none that the kernels run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from onekernel.device.facts import facts
from onekernel.device.support import check_supported
from onekernel.errors import DeviceError

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    try:
        check_supported(facts("cuda:0"))
    except DeviceError as error:
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: {error}"))
    for item in ours:
        item.add_marker(pytest.mark.gpu)
