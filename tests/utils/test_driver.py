"""The driver of GPUs, which a stand-in plays."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from minisgl.utils.driver import GpuDriver

MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
MINOR = 76


class FakeLibrary:
    """As libcuda.so.1, of a machine with two GPUs: Ampere's and Hopper's."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.contexts: list[int] = []

    def cuInit(self, flags: int) -> int:
        return self.status

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = 2
        return self.status

    def cuDeviceGet(self, device: Any, gpu: int) -> int:
        device._obj.value = gpu + 100
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = {(100, MAJOR): 8, (100, MINOR): 6, (101, MAJOR): 9}.get(
            (device.value, attribute), 0
        )
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.contexts.append(device.value)
        return 0


def test_each_gpu_has_its_capability() -> None:
    driver = GpuDriver(FakeLibrary())
    assert driver.num_gpus == 2
    assert [driver.capability(gpu) for gpu in range(2)] == [(8, 6), (9, 0)]


def test_the_context_of_a_gpu_is_made() -> None:
    library = FakeLibrary()
    GpuDriver(library).make_context(1)
    assert library.contexts == [101]


def test_a_driver_that_does_not_work_has_no_gpus() -> None:
    assert GpuDriver(FakeLibrary(status=100)).num_gpus == 0


def test_without_a_driver_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", fail)
    assert GpuDriver.load() is None
