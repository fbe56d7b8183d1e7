"""Buffers whose pages are released and mapped again: on this CPU, and with a CUDA driver of Python in CUDA's place."""

from __future__ import annotations

import array
import gc
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lmworks.engine.core import virtual_memory
from lmworks.engine.core.virtual_memory import (
    AccessDescription,
    AllocationProperties,
    CudaPages,
    Location,
    OutOfMemory,
    TorchBuffer,
    VirtualBuffer,
    is_supported,
)
from lmworks.spec import LMWorksError

CPU = torch.device("cpu")
MIB = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def resident_bytes(address: int, size: int) -> int:
    """Of the pages of a range, those that are in memory: bit 63 of their entries."""
    with Path("/proc/self/pagemap").open("rb") as entries:
        entries.seek(address // mmap.PAGESIZE * 8)
        pages = array.array("Q", entries.read(-(-size // mmap.PAGESIZE) * 8))
    return sum(page >> 63 for page in pages) * mmap.PAGESIZE


def reserved(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


@linux
def test_pages_come_and_go_at_one_address() -> None:
    buffer = VirtualBuffer(8 * MIB, CPU)
    assert buffer.mapped_bytes == 0
    buffer.map()
    numbers = buffer.tensor((2, MIB), torch.float32)
    address = numbers.data_ptr()
    assert buffer.mapped_bytes == 8 * MIB and not numbers.any()
    numbers[1] = 7
    assert resident_bytes(address + 4 * MIB, 4 * MIB) == 4 * MIB
    buffer.unmap()
    assert buffer.mapped_bytes == resident_bytes(address, 8 * MIB) == 0
    buffer.map()
    again = buffer.tensor((2, MIB), torch.float32)
    assert again.data_ptr() == address and not again.any()
    numbers[0, 5] = 3.0
    assert again[0, 5] == 3.0  # a tensor from before is valid


@linux
def test_address_range_lives_as_long_as_its_last_tensor() -> None:
    buffer = VirtualBuffer(8 * MIB, CPU)
    buffer.map()
    numbers = buffer.tensor((MIB,), torch.bfloat16)
    address = numbers.data_ptr()
    del buffer
    gc.collect()
    numbers.fill_(1)
    del numbers
    gc.collect()
    assert not reserved(address)


@linux
def test_too_much_address_space_is_one_line() -> None:
    with pytest.raises(OutOfMemory, match="bytes of address space: Cannot allocate memory"):
        VirtualBuffer(2**62, CPU)


@pytest.mark.parametrize("kind", [VirtualBuffer, TorchBuffer])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_tensors_of_every_dtype(kind: type[VirtualBuffer | TorchBuffer], dtype: torch.dtype) -> None:
    buffer = kind(3 * 5 * dtype.itemsize, CPU)
    buffer.map()
    numbers = buffer.tensor((3, 5), dtype)
    assert numbers.shape == (3, 5) and numbers.dtype is dtype and numbers.is_contiguous()
    assert not numbers.float().any()


def test_torch_buffer_releases_and_allocates() -> None:
    buffer = TorchBuffer(64, CPU)
    buffer.map()
    buffer.tensor((16,), torch.float32).fill_(1)
    assert buffer.mapped_bytes == 64
    buffer.unmap()
    assert buffer.mapped_bytes == 0
    buffer.map()
    assert not buffer.tensor((16,), torch.float32).any()
    with pytest.raises(OutOfMemory):
        TorchBuffer(2**62, CPU).map()


# --- CUDA's driver --------------------------------------------------------------------------------------


def test_structures_are_laid_out_as_in_cuda_h() -> None:
    """Sizes and offsets as a C compiler gives them for cuda.h of CUDA 12.8 and 12.9."""
    names = ("type", "requested_handle_types", "location", "win32_handle_metadata", "compression_type", "usage")
    offsets = [getattr(AllocationProperties, name).offset for name in names]
    assert (virtual_memory.ctypes.sizeof(AllocationProperties), offsets) == (32, [0, 4, 8, 16, 24, 26])
    assert virtual_memory.ctypes.sizeof(Location) == 8
    assert (virtual_memory.ctypes.sizeof(AccessDescription), AccessDescription.flags.offset) == (12, 8)


ERROR_NAMES = {1: b"CUDA_ERROR_INVALID_VALUE", 2: b"CUDA_ERROR_OUT_OF_MEMORY", 801: b"CUDA_ERROR_NOT_SUPPORTED"}


class PythonDriver:
    """The driver's rules of virtual memory, as its documentation has them; a violation is CUDA_ERROR_INVALID_VALUE."""

    GRANULARITY = 2 * MIB

    def __init__(self, memory: int) -> None:
        self.memory = memory  # physical bytes
        self.allocations: dict[int, int] = {}  # bytes by handle
        self.handles: set[int] = set()  # not released
        self.ranges: dict[int, int] = {}  # reserved bytes by address
        self.mapped: dict[int, int] = {}  # handles by address
        self.accessible: set[int] = set()
        self.failing: dict[str, int] = {}  # errors of the next call, by function
        self.count = 0

    def __getattribute__(self, name: str) -> Any:
        failing = object.__getattribute__(self, "failing") if name.startswith("cuMem") else {}
        if name in failing:
            error = failing.pop(name)
            return lambda *_arguments: error
        return object.__getattribute__(self, name)

    @property
    def used(self) -> int:
        return sum(self.allocations.values())

    def collect(self) -> int:
        held = {*self.handles, *self.mapped.values()}
        self.allocations = {handle: size for handle, size in self.allocations.items() if handle in held}
        return 0

    def cuGetErrorName(self, status: int, text: Any) -> int:
        text._obj.value = ERROR_NAMES[status]
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = int((attribute, device) == (102, 0))
        return 0

    def cuMemGetAllocationGranularity(self, granularity: Any, properties: Any, option: int) -> int:
        granularity._obj.value = self.GRANULARITY
        return 0 if option == 0 and self.on_device(properties._obj) else 1

    def on_device(self, properties: AllocationProperties) -> bool:
        location = properties.location
        return (properties.type, properties.requested_handle_types, location.type, location.id) == (1, 0, 1, 0)

    def cuMemAddressReserve(self, address: Any, size: int, alignment: int, hint: int, flags: int) -> int:
        self.count += 1
        address._obj.value = self.count << 40
        self.ranges[self.count << 40] = size
        return int(size % self.GRANULARITY != 0 or alignment != self.GRANULARITY or hint != 0 or flags != 0)

    def cuMemAddressFree(self, address: int, size: int) -> int:
        return int(address in self.mapped or self.ranges.pop(address, None) != size)

    def cuMemCreate(self, handle: Any, size: int, properties: Any, flags: int) -> int:
        if size % self.GRANULARITY or flags or not self.on_device(properties._obj):
            return 1
        if self.used + size > self.memory:
            return 2
        self.count += 1
        handle._obj.value = self.count
        self.handles.add(self.count)
        self.allocations[self.count] = size
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        self.handles.remove(handle.value)
        return self.collect()

    def cuMemMap(self, address: int, size: int, offset: int, handle: Any, flags: int) -> int:
        if self.ranges.get(address) != size or address in self.mapped or offset or flags:
            return 1
        self.mapped[address] = handle.value
        return 0

    def cuMemSetAccess(self, address: int, size: int, description: Any, count: int) -> int:
        access = description._obj
        if address not in self.mapped or self.ranges[address] != size or count != 1:
            return 1
        self.accessible.add(address)
        return int((access.location.type, access.location.id, access.flags) != (1, 0, 3))

    def cuMemUnmap(self, address: int, size: int) -> int:
        if address not in self.mapped or self.ranges[address] != size:
            return 1
        del self.mapped[address]
        self.accessible.discard(address)
        return self.collect()


@pytest.fixture
def cuda_driver(monkeypatch: pytest.MonkeyPatch) -> PythonDriver:
    found = PythonDriver(10 * MIB)
    monkeypatch.setattr(virtual_memory, "driver", lambda: found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return found


CUDA = torch.device("cuda")


def test_driver_maps_and_unmaps(cuda_driver: PythonDriver) -> None:
    assert is_supported(CUDA)
    pages = CudaPages(3 * MIB, CUDA)
    assert pages.size == 4 * MIB and cuda_driver.used == 0
    address = pages.address
    for _ in range(3):
        pages.map()
        assert cuda_driver.used == 4 * MIB
        assert cuda_driver.accessible == {address}
        pages.unmap()
        assert cuda_driver.used == 0 and pages.address == address
    assert pages.__cuda_array_interface__["data"] == (address, False)
    pages.map()
    del pages
    gc.collect()
    assert not cuda_driver.used and not cuda_driver.mapped and not cuda_driver.ranges


def test_driver_out_of_memory_can_be_tried_again(cuda_driver: PythonDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = CudaPages(8 * MIB, CUDA), CudaPages(4 * MIB, CUDA)
    first.map()
    with pytest.raises(OutOfMemory, match=r"cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        second.map()
    assert not cuda_driver.handles and cuda_driver.used == 8 * MIB
    first.unmap()
    second.map()
    assert cuda_driver.used == 4 * MIB and cuda_driver.accessible == {second.address}
    # What torch has reserved and does not use is released first.
    monkeypatch.setattr(torch.cuda, "empty_cache", second.unmap)
    first.map()
    assert cuda_driver.used == 8 * MIB


@pytest.mark.parametrize("function", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_driver_failure_leaves_nothing_mapped(cuda_driver: PythonDriver, function: str) -> None:
    pages = CudaPages(4 * MIB, CUDA)
    cuda_driver.failing[function] = 801
    with pytest.raises(LMWorksError, match=rf"the CUDA driver failed: {function}: CUDA_ERROR_NOT_SUPPORTED \(801\)"):
        pages.map()
    assert not cuda_driver.used and not cuda_driver.handles and not cuda_driver.mapped
    pages.map()
    assert cuda_driver.used == 4 * MIB


def test_without_a_driver_it_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_memory, "driver", lambda: None)
    assert not is_supported(CUDA)
