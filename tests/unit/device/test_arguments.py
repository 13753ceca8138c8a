"""What would silently corrupt memory on the device is refused by name on the host."""

from __future__ import annotations

import pytest
import torch

from onekernel.device.arguments import bind
from onekernel.device.bound import ArgumentSlots, offsets
from onekernel.device.kernel import Arg
from onekernel.device.spec import KernelSpec, Pointer, Scalar, Struct
from onekernel.errors import DeviceError

CPU = torch.device("cpu")
SPEC = KernelSpec(
    "k.cu",
    "k",
    params=(
        Pointer("weights", "bfloat16", ("rows", "k")),
        Pointer("x", "float32", ("k",)),
        Scalar("rows"),
        Scalar("scale", "f32"),
        Pointer("tokens", "int64", (4,), pinned=True, align_bytes=8),
        Struct("limits", 12),
    ),
)


def args(**changes: Arg) -> list[Arg]:
    good: dict[str, Arg] = {
        "weights": torch.zeros(8, 64, dtype=torch.bfloat16),
        "x": torch.zeros(64),
        "rows": 8,
        "scale": 2.0,
        "tokens": torch.zeros(4, dtype=torch.int64),
        "limits": bytes(range(12)),
    }
    return list((good | changes).values())


def test_good_arguments_become_addresses_and_numbers() -> None:
    given = args(scale=3)
    weights, x, rows, scale, tokens, limits = bind(SPEC, CPU, given)
    assert [weights, x, tokens] == [given[i].data_ptr() for i in (0, 1, 4)]  # type: ignore[union-attr]
    assert rows == 8
    assert scale == 3.0
    assert limits == bytes(range(12))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": torch.zeros(8, 64)}, "weights of kernel k has dtype torch.float32; it must be bfloat16"),
        ({"weights": torch.zeros(9, 64, dtype=torch.bfloat16)}, "rows of kernel k has value 8, but rows is 9"),
        ({"x": torch.zeros(65)}, r"x of kernel k has shape \(65,\), but k is 64"),
        ({"x": torch.zeros(64, 1)}, r"x of kernel k has shape \(64, 1\); it must have 1 dimensions"),
        ({"x": torch.zeros(128)[::2]}, r"x of kernel k has strides \(2,\); it must be contiguous"),
        ({"x": torch.zeros(65)[1:]}, "x of kernel k starts at 0x[0-9a-f]+, not at a multiple of 16 bytes"),
        ({"x": torch.zeros(64, device="meta")}, "x of kernel k is on meta; the kernel runs on cpu"),
        ({"x": 3}, "x of kernel k is 3; it must be a float32 tensor"),
        ({"rows": 8.0}, "rows of kernel k is 8.0; it must be an int from -2147483648"),
        ({"rows": True}, "rows of kernel k is True; it must be an int"),
        ({"rows": 2**31}, "rows of kernel k is 2147483648; it must be an int from .* to 2147483647"),
        ({"scale": "1"}, "scale of kernel k is '1'; it must be a float"),
        ({"tokens": torch.zeros(5, dtype=torch.int64)}, r"tokens of kernel k has shape \(5,\), but the kernel takes 4"),
        ({"limits": bytes(8)}, "limits of kernel k has 8 bytes; the kernel's struct has 12"),
        ({"limits": torch.zeros(12)}, "limits of kernel k is Tensor; it must be the bytes of a struct"),
    ],
)
def test_each_mistake_is_named(changes: dict[str, Arg], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        bind(SPEC, CPU, args(**changes))


def test_the_count_is_checked() -> None:
    with pytest.raises(
        DeviceError, match=r"kernel k takes 6 arguments \(weights, x, rows, scale, tokens, limits\), not 4"
    ):
        bind(SPEC, CPU, args()[:4])


def test_an_unknown_dtype_in_a_spec_is_named() -> None:
    spec = KernelSpec("k.cu", "k", params=(Pointer("x", "bf16", (1,)),))
    with pytest.raises(DeviceError, match="'bf16' is not a torch dtype"):
        bind(spec, CPU, [torch.zeros(1)])


def test_arguments_are_packed_at_multiples_of_eight_bytes() -> None:
    params = (Scalar("a", "u32"), Struct("s", 12), Scalar("b", "f32"))
    spec = KernelSpec("k.cu", "k", params=params)
    slots = ArgumentSlots(spec)
    slots.fill([7, bytes(range(1, 13)), 1.0])
    assert offsets(spec) == [0, 8, 24]
    assert bytes(slots.buffer[:28]) == (
        (7).to_bytes(8, "little") + bytes(range(1, 13)) + bytes(4) + b"\x00\x00\x80\x3f"
    )
