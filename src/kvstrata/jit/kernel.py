"""A compiled kernel on the GPU, and a launch that is prepared once.

``Kernel.launch`` takes anything that ``cuda.core.launch`` takes. ``Launch`` is for the hot path: the kernel's only
parameter is a struct whose bytes stay in place, the caller rewrites the fields that changed and launches; only the
driver call remains.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from .compiler import compile

ONE_POINTER = ctypes.c_void_p * 1
PORTABLE_SHARED = 48 * 1024  # bytes of shared memory, static and dynamic, available without opting in


def arch_of(device: torch.device | int | None = None) -> str:
    """Compile target of a CUDA device, such as ``"sm_90"``."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def current_stream(device: int) -> int:
    """Raw handle of torch's current stream."""
    return torch._C._cuda_getCurrentRawStream(device)


def current_device() -> int:
    """Index of torch's current device, if CUDA has been initialised."""
    return torch._C._cuda_getDevice()


def is_capturing() -> bool:
    """True if torch's current stream is part of a graph capture."""
    return torch._C._cuda_isCurrentStreamCapturing()


def capture_id(stream: int) -> int:
    """Id of the graph capture that a capturing stream is part of; unique."""
    from cuda.bindings import driver

    error, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    if int(error):
        raise RuntimeError(f"stream: the driver returned {error.name} for its capture")
    return int(number)


class Kernel:
    """One loaded kernel; usable in every context of its architecture."""

    def __init__(self, source: Path, entry: str, arch: str) -> None:
        from cuda.core import ObjectCode

        cubin = compile(source, entry, arch=arch)
        self.entry = entry
        self._code = ObjectCode.from_cubin(cubin.code, name=source.name)
        self.core = self._code.get_kernel(cubin.symbol)
        self.opted: dict[int, int] = {}  # bytes of dynamic shared memory that launches may request, by device

    @functools.cached_property
    def driver(self) -> Any:
        from cuda.bindings import driver

        return driver

    @functools.cached_property
    def function(self) -> Any:
        """The kernel in the form that driver launches take."""
        return self.driver.CUfunction(int(self.core.handle))

    @functools.cached_property
    def static_shared(self) -> int:
        """Bytes of shared memory that the kernel declares itself, in addition to what a launch requests."""
        from cuda.bindings import driver

        size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        kernel, device = driver.CUkernel(int(self.core.handle)), driver.CUdevice(torch.cuda.current_device())
        error, number = driver.cuKernelGetAttribute(size, kernel, device)
        if int(error):
            raise RuntimeError(f"{self.entry}: the driver returned {error.name} for its shared memory")
        return int(number)

    def resident(self, block: int, shared: int = 0) -> int:
        """Number of blocks that are resident on torch's current device at once."""
        return _resident(self, block, shared, torch.cuda.current_device())

    def launch(self, grid: Any, block: Any, args: tuple[Any, ...] = (), *, shared: int = 0) -> None:
        """Launch on torch's current device and stream; ``args`` are pointers (int), numpy scalars or ctypes values."""
        from cuda.core import LaunchConfig, Stream, launch

        stream = Stream.from_handle(current_stream(torch.cuda.current_device()))
        launch(stream, LaunchConfig(grid=grid, block=block, shmem_size=shared), self.core, *args)


@functools.cache
def _launch_kernel() -> Any:
    """``cuLaunchKernelEx``. Its arguments are ctypes objects, so that none is converted."""
    from cuda.bindings import driver

    legacy = driver.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_LEGACY_STREAM  # torch's stream 0
    error, address, *_ = driver.cuGetProcAddress(b"cuLaunchKernelEx", 12000, int(legacy))
    if int(error) or not address:
        raise RuntimeError(f"cuLaunchKernelEx: the driver returned {error.name} for its address")
    return ctypes.CFUNCTYPE(ctypes.c_int)(int(address))


class Launch:
    """A kernel with its parameter struct and launch shape, ready to launch. Not for use by two threads at once.

    ``params`` are copied, unless they are a bytearray: launches with the same struct may share one that is rewritten.
    ``overlap``: programmatic stream serialization, the kernel may start before the previous one has ended.
    """

    def __init__(
        self,
        kernel: Kernel,
        grid: int | tuple[int, int],
        block: int,
        params: bytes | bytearray,
        *,
        shared: int = 0,
        overlap: bool = False,
    ) -> None:
        if len(params) % 8:  # the driver reads the whole struct, padding included; it contains pointers
            raise ValueError(f"params: expected a multiple of 8 bytes, padding included, got {len(params)}")
        self.params = params if isinstance(params, bytearray) else bytearray(params)
        self.entry = kernel.entry
        self._kernel = kernel
        self._view = (ctypes.c_char * len(params)).from_buffer(self.params)
        self._pointers = ONE_POINTER(ctypes.addressof(self._view))
        self.args = ctypes.addressof(self._pointers)
        x, y = (grid, 1) if isinstance(grid, int) else grid
        if shared + kernel.static_shared > PORTABLE_SHARED:
            self._opt_in(kernel.driver, shared)
        self._config = _config(kernel.driver, x, y, block, shared, overlap)
        self._stream: int | None = None
        self._start: Any = None  # driver call on that stream

    def _opt_in(self, driver: Any, shared: int) -> None:
        """Allow launches of the kernel to request this much shared memory, or more if another launch already does."""
        kernel, number = self._kernel, torch.cuda.current_device()
        if shared <= kernel.opted.get(number, 0):
            return
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        of_kernel, device = driver.CUkernel(int(kernel.core.handle)), driver.CUdevice(number)
        (error,) = driver.cuKernelSetAttribute(most, shared, of_kernel, device)
        if int(error):
            self.fail(error)
        kernel.opted[number] = shared

    def _use_stream(self, stream: int) -> None:
        """Prepare the driver call for a stream; setting the stream takes longer than a launch (docs/perf-log.md)."""
        self._config.hStream = stream
        if self._start is None:
            given = (self._config.getPtr(), int(self._kernel.function), self.args, None)
            self._start = functools.partial(_launch_kernel(), *map(ctypes.c_void_p, given))
        self._stream = stream

    def __call__(self, stream: int) -> None:
        if stream != self._stream:
            self._use_stream(stream)
        if error := self._start():
            self.fail(error)

    def fail(self, error: Any) -> None:
        raise RuntimeError(f"{self.entry}: the launch failed with {self._kernel.driver.CUresult(int(error)).name}")


def _config(driver: Any, x: int, y: int, block: int, shared: int, overlap: bool) -> Any:
    """Launch configuration in the form that the driver takes."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = x, y, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


@functools.lru_cache(maxsize=1024)
def _resident(kernel: Kernel, block: int, shared: int, device: int) -> int:
    from cuda.bindings import driver

    function = driver.CUfunction(int(kernel.core.handle))
    error, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, block, shared)
    if int(error):
        raise RuntimeError(f"{kernel.entry}: the driver returned {error.name} for its occupancy")
    return blocks * torch.cuda.get_device_properties(device).multi_processor_count


def bind_context(device: int) -> None:
    """Make the device's primary context current in this thread; a new thread has none until torch needs one."""
    from cuda.core import Device

    Device(device).set_current()


_BOUND = threading.local()
_NOTHING: AbstractContextManager[None] = nullcontext()


def use_device(device: int) -> AbstractContextManager[None]:
    """Make a device torch's current one, with its context; does nothing if it is and was used in this thread."""
    if getattr(_BOUND, "device", None) == device == torch.cuda.current_device():
        return _NOTHING
    return _switch(device)


@contextmanager
def _switch(device: int) -> Iterator[None]:
    with torch.cuda.device(device):
        bind_context(device)
        yield
    if device == torch.cuda.current_device():
        _BOUND.device = device


def launch_on(device: int, launch: Launch, stream: int | None = None) -> None:
    """Launch on a stream of a device (None: its current stream); cheap if the device is already in use."""
    stream = current_stream(device) if stream is None else stream
    if getattr(_BOUND, "device", None) == device == current_device():
        launch(stream)
        return
    with _switch(device):
        launch(stream)


def load(source: Path, entry: str, arch: str | None = None) -> Kernel:
    """Load the kernel ``entry`` of ``source``, compiling it if it is not cached; ``arch`` defaults to the device's."""
    return _load(source, entry, arch or arch_of())


@functools.cache
def _load(source: Path, entry: str, arch: str) -> Kernel:
    return Kernel(source, entry, arch)
