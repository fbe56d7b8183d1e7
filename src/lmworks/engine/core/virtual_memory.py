"""Buffers that give their physical memory back and take it again, at the same address.

CUDA graphs hold addresses: a buffer that is freed and allocated again would invalidate them. So its address range is
reserved once, and only the pages behind it are released and mapped again: on CUDA by the driver's virtual memory
management (from the library that torch has loaded), on a CPU by madvise. Content is lost; pages that are mapped again
are zero. These pages are not torch's: `torch.cuda.memory_reserved` does not count them, `mem_get_info` does.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
import weakref
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any

import torch
from torch import Tensor

from ...spec import LMWorksError


class OutOfMemory(LMWorksError):
    """No memory for the pages. Nothing of the buffer is mapped, and `map` can be called again."""


class VirtualBuffer:
    """Memory at one address. `map` gives it pages of zeros, `unmap` releases them; it starts unmapped."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.pages = CudaPages(size, device) if device.type == "cuda" else HostPages(size)
        self.mapped = False
        self.whole: Tensor | None = None  # uint8, over the whole range

    @property
    def mapped_bytes(self) -> int:
        return self.pages.size if self.mapped else 0

    def map(self) -> None:
        if not self.mapped:
            self.pages.map()
            self.mapped = True
            self.whole = self.pages.tensor() if self.whole is None else self.whole
            self.pages.clear(self.whole)

    def unmap(self) -> None:
        """Tensors over the buffer must not be used until it is mapped again."""
        if self.mapped:
            self.pages.unmap()
            self.mapped = False

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor over the beginning of the buffer, which has to be mapped."""
        return view(self.whole, shape, dtype)


class TorchBuffer:
    """The same interface over torch's allocator: `map` allocates, in general at another address."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.whole: Tensor | None = None

    @property
    def mapped(self) -> bool:
        return self.whole is not None

    @property
    def mapped_bytes(self) -> int:
        return self.size if self.mapped else 0

    def map(self) -> None:
        if self.whole is None:
            try:
                self.whole = torch.zeros(self.size, dtype=torch.uint8, device=self.device)
            except RuntimeError as error:  # out of memory, of several types
                raise OutOfMemory(str(error).partition("\n")[0]) from None

    def unmap(self) -> None:
        """Memory is released once no tensor over the buffer is left."""
        self.whole = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return view(self.whole, shape, dtype)


Buffer = VirtualBuffer | TorchBuffer


def view(whole: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    assert whole is not None, "the buffer is not mapped"
    return whole[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)


def is_supported(device: torch.device) -> bool:
    """Whether pages can be released and mapped again at the same address."""
    if device.type == "cpu":
        return sys.platform == "linux"  # elsewhere, MADV_DONTNEED keeps pages or their content
    found = driver()
    if device.type != "cuda" or found is None:
        return False
    supported = c_int()
    status = found.cuDeviceGetAttribute(byref(supported), VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_index(device))
    return status == SUCCESS and bool(supported.value)


# --- CPU ------------------------------------------------------------------------------------------------


class HostPages:
    """An anonymous mapping; the kernel provides a page of zeros when one is first touched."""

    def __init__(self, size: int) -> None:
        self.size = size
        try:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(f"{size:,} bytes of address space: {error.strerror}") from None

    def map(self) -> None:
        """Nothing to do: a touched page is mapped."""

    def unmap(self) -> None:
        self.memory.madvise(mmap.MADV_DONTNEED)

    def tensor(self) -> Tensor:
        """Keeps the mapping alive."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)

    def clear(self, whole: Tensor) -> None:
        """Nothing to do: new pages are zero."""


# --- CUDA -----------------------------------------------------------------------------------------------

SUCCESS, ERROR_OUT_OF_MEMORY = 0, 2  # CUresult
VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102  # CUdevice_attribute
ALLOCATION_TYPE_PINNED = LOCATION_TYPE_DEVICE = 1
ACCESS_READWRITE = 3
GRANULARITY_MINIMUM = 0


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_metadata", c_void_p),
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


Address = Handle = Flags = c_uint64
SIGNATURES: dict[str, list[Any]] = {
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(AllocationProperties), c_int],
    "cuMemAddressReserve": [POINTER(Address), c_size_t, c_size_t, Address, Flags],
    "cuMemAddressFree": [Address, c_size_t],
    "cuMemCreate": [POINTER(Handle), c_size_t, POINTER(AllocationProperties), Flags],
    "cuMemRelease": [Handle],
    "cuMemMap": [Address, c_size_t, c_size_t, Handle, Flags],
    "cuMemUnmap": [Address, c_size_t],
    "cuMemSetAccess": [Address, c_size_t, POINTER(AccessDescription), c_size_t],
}


@functools.cache
def driver() -> Any:
    """The CUDA driver's library; None where there is none, or one without virtual memory management."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, c_int
    except (OSError, AttributeError):
        return None
    return library


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver; raise if it fails."""
    status = getattr(driver(), name)(*arguments)
    if status == SUCCESS:
        return
    text = c_char_p()
    driver().cuGetErrorName(status, byref(text))
    error = f"{name}: {(text.value or b'unknown error').decode()} ({status})"
    raise OutOfMemory(error) if status == ERROR_OUT_OF_MEMORY else LMWorksError(f"the CUDA driver failed: {error}")


def device_index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class CudaPages:
    """An address range reserved with the driver, and one physical allocation behind it, or none."""

    def __init__(self, size: int, device: torch.device) -> None:
        index = device_index(device)
        self.device = torch.device("cuda", index)
        torch.cuda.synchronize(self.device)  # creates the context, which torch does not before it is needed
        location = Location(LOCATION_TYPE_DEVICE, index)
        self.properties = AllocationProperties(type=ALLOCATION_TYPE_PINNED, location=location)
        self.access = AccessDescription(location, ACCESS_READWRITE)
        granularity, address = c_size_t(), Address()
        call("cuMemGetAllocationGranularity", byref(granularity), byref(self.properties), GRANULARITY_MINIMUM)
        self.size = -(-size // granularity.value) * granularity.value
        call("cuMemAddressReserve", byref(address), self.size, granularity.value, 0, 0)
        self.address = address.value
        self.mapping = Mapping(self.address, self.size, self.device)
        weakref.finalize(self, self.mapping.free).atexit = False  # the end of the process frees it too

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Read by torch, whose tensor keeps this object, and so the address range, alive."""
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 2}

    def tensor(self) -> Tensor:
        """While mapped: torch asks the driver for the device of the address."""
        whole = torch.as_tensor(self, device=self.device)
        assert whole.data_ptr() == self.address, "torch has copied the buffer"
        return whole

    def map(self) -> None:
        try:
            self.map_once()
        except OutOfMemory:
            torch.cuda.empty_cache()  # what torch has reserved and does not use
            self.map_once()

    def map_once(self) -> None:
        """Map all pages, or none."""
        handle = Handle()
        call("cuMemCreate", byref(handle), self.size, byref(self.properties), 0)
        try:
            call("cuMemMap", self.address, self.size, 0, handle, 0)
        finally:
            call("cuMemRelease", handle)  # once mapped, memory is freed when it is unmapped
        self.mapping.exists = True
        try:
            call("cuMemSetAccess", self.address, self.size, byref(self.access), 1)
        except LMWorksError:
            self.mapping.unmap()
            raise

    def unmap(self) -> None:
        self.mapping.unmap()

    def clear(self, whole: Tensor) -> None:
        """The driver does not zero new memory."""
        whole.zero_()
        torch.cuda.synchronize(self.device)  # whatever stream is next


class Mapping:
    """What is undone when the pages are garbage; apart from them, as a finalizer must not refer to its object."""

    def __init__(self, address: int, size: int, device: torch.device) -> None:
        self.address, self.size, self.device = address, size, device
        self.exists = False

    def unmap(self) -> None:
        if self.exists:
            torch.cuda.synchronize(self.device)  # cuMemUnmap does not wait for kernels
            call("cuMemUnmap", self.address, self.size)
            self.exists = False

    def free(self) -> None:
        self.unmap()
        call("cuMemAddressFree", self.address, self.size)
