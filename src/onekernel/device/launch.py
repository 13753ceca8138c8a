"""Prepare a launch: the driver's configuration, checked against what the device can hold before anything can hang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from onekernel.device.driver import check
from onekernel.device.facts import DeviceFacts
from onekernel.errors import DeviceError

PORTABLE_CLUSTER = 8
"""Largest cluster that every device with clusters takes; above it a kernel must opt in."""

MAX_CLUSTER = 16


class LaunchShape(NamedTuple):
    """How many CTAs of how many threads, with how much dynamic shared memory, in clusters of how many CTAs."""

    grid: int
    block: int
    shared_bytes: int = 0
    cluster: int = 1
    cooperative: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """The driver's configuration of a launch, and how many CTAs of its shape the device holds at once."""

    config: Any
    resident_ctas: int


def prepare(name: str, function: Any, shape: LaunchShape, stream: int, found: DeviceFacts, cuda: Any) -> Prepared:
    """Check a shape against a loaded function and configure its launch; the device's context must be current.

    What an earlier shape of the same function was prepared for stays possible. Calls for one function must not overlap.
    Raises DeviceError with both numbers if the shape is not possible.
    """
    _check_shape(name, function, shape, found, cuda)
    if shape.shared_bytes:
        _allow_shared_bytes(name, function, shape.shared_bytes, cuda)
    if shape.cluster > PORTABLE_CLUSTER:
        non_portable = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        _set(function, non_portable, 1, name, cuda)
    config = _configure(shape, stream, cuda)
    return Prepared(config, _resident_ctas(name, function, shape, config, found, cuda))


def check_resident(name: str, shape: LaunchShape, resident_ctas: int, found: DeviceFacts) -> None:
    """Raise DeviceError if CTAs that must be resident at once are not: without this check it would be a hang."""
    needed = shape.grid if shape.cooperative else shape.cluster
    if resident_ctas < needed:
        raise DeviceError(
            f"kernel {name} needs {needed} CTAs resident at once ({shape.block} threads and {shape.shared_bytes} bytes "
            f"of dynamic shared memory each, clusters of {shape.cluster}); {found.name} with {found.sm_count} SMs "
            f"holds {resident_ctas}"
        )


def _check_shape(name: str, function: Any, shape: LaunchShape, found: DeviceFacts, cuda: Any) -> None:
    if shape.grid < 1 or shape.block < 1 or shape.shared_bytes < 0:
        raise DeviceError(f"kernel {name}: grid and block must be at least 1, shared_bytes at least 0, not {shape}")
    if not 1 <= shape.cluster <= MAX_CLUSTER or shape.grid % shape.cluster:
        raise DeviceError(
            f"kernel {name}: cluster is {shape.cluster} in a grid of {shape.grid}; it must divide the grid and be at "
            f"most {MAX_CLUSTER}"
        )
    if shape.cluster > 1 and not found.clusters:
        raise DeviceError(f"kernel {name} asks for clusters of {shape.cluster}; {found.name} ({found.sm}) has none")
    if shape.cooperative and not found.cooperative:
        raise DeviceError(f"kernel {name} asks for a cooperative launch; {found.name} ({found.sm}) has none")
    if shape.block > (most := _attribute(name, function, "MAX_THREADS_PER_BLOCK", cuda)):
        raise DeviceError(
            f"kernel {name} is asked for {shape.block} threads per CTA; it was compiled for at most {most}"
        )
    static_bytes = _attribute(name, function, "SHARED_SIZE_BYTES", cuda)
    if static_bytes + shape.shared_bytes > found.shared_bytes_per_block:
        raise DeviceError(
            f"kernel {name} needs {static_bytes} + {shape.shared_bytes} bytes of shared memory; a CTA on {found.name} "
            f"has at most {found.shared_bytes_per_block}"
        )


def _configure(shape: LaunchShape, stream: int, cuda: Any) -> Any:
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block, 1, 1
    config.sharedMemBytes = shape.shared_bytes
    config.hStream = cuda.CUstream(stream)
    attributes = []
    if shape.cluster > 1:
        cluster = cuda.CUlaunchAttribute()
        cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = cluster.value.clusterDim
        size.x, size.y, size.z = shape.cluster, 1, 1
        attributes.append(cluster)
    if shape.cooperative:
        cooperative = cuda.CUlaunchAttribute()
        cooperative.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        cooperative.value.cooperative = 1
        attributes.append(cooperative)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _resident_ctas(name: str, function: Any, shape: LaunchShape, config: Any, found: DeviceFacts, cuda: Any) -> int:
    if shape.cluster > 1:
        clusters = cuda.cuOccupancyMaxActiveClusters(function, config)
        return int(check(clusters, f"asking how many clusters of {name} fit", cuda)) * shape.cluster
    per_sm = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, shape.block, shape.shared_bytes)
    return int(check(per_sm, f"asking how many CTAs of {name} fit", cuda)) * found.sm_count


def _allow_shared_bytes(name: str, function: Any, shared_bytes: int, cuda: Any) -> None:
    """Let a function have so much dynamic shared memory, and no less than before.

    The limit is one number of the function for all its shapes, and the driver compares it with every launch: a smaller
    shape that lowered it would make launches of a larger, prepared one fail with CUDA_ERROR_INVALID_VALUE.
    """
    most = max(shared_bytes, _attribute(name, function, "MAX_DYNAMIC_SHARED_SIZE_BYTES", cuda))
    _set(function, cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, most, name, cuda)


def _attribute(name: str, function: Any, what: str, cuda: Any) -> int:
    member = getattr(cuda.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{what}")
    return int(check(cuda.cuFuncGetAttribute(member, function), f"reading {what} of {name}", cuda))


def _set(function: Any, attribute: Any, value: int, name: str, cuda: Any) -> None:
    check(cuda.cuFuncSetAttribute(function, attribute, value), f"setting {attribute.name} of {name} to {value}", cuda)
