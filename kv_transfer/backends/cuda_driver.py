"""A typed, thin layer over the CUDA driver: one device, as a transfer backend uses it.

The driver's own library is called, not the runtime's, so that no torch is needed and nothing is installed.
Every return code is looked at. Calls from any thread; those on memory and streams want the device to be
`current` on the calling thread.
"""

import contextlib
import ctypes
import functools
from collections.abc import Generator
from typing import Any

from baton.core.errors import SetupError

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
"""sizeof(CUipcMemHandle)"""
UUID_BYTES = 16

_STREAM_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: does not wait for the default stream, on which the engine may compute."""
_LAZY_ENABLE_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is, and required."""


class CudaError(Exception):
    """The driver refused a call; the text names the call and the error."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * UUID_BYTES),)


_ADDRESS, _SIZE, _DEVICE, _POINTER = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
    "cuDeviceGet": (ctypes.POINTER(_DEVICE), ctypes.c_int),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(_Uuid), _DEVICE),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_POINTER), _DEVICE),
    "cuDevicePrimaryCtxRelease_v2": (_DEVICE,),
    "cuCtxPushCurrent_v2": (_POINTER,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_POINTER),),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_ADDRESS), ctypes.POINTER(_SIZE), _ADDRESS),
    "cuIpcGetMemHandle": (ctypes.POINTER(_IpcHandle), _ADDRESS),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_ADDRESS), _IpcHandle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_ADDRESS,),
    "cuStreamCreate": (ctypes.POINTER(_POINTER), ctypes.c_uint),
    "cuStreamSynchronize": (_POINTER,),
    "cuStreamDestroy_v2": (_POINTER,),
    "cuMemcpyDtoDAsync_v2": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
}
"""Names as the library exports them: cuda.h maps a call to its newest version by a macro."""


class _Driver:
    """Raises SetupError: this machine has no driver, or it does not find a device."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(LIBRARY)
            self._calls = {name: getattr(library, name) for name in _SIGNATURES}
        except (OSError, AttributeError) as error:
            raise SetupError(f"this machine has no CUDA driver that fits: {error}") from None
        for name, arguments in _SIGNATURES.items():
            self._calls[name].argtypes, self._calls[name].restype = arguments, ctypes.c_int
        try:
            self("cuInit", 0)
        except CudaError as error:
            raise SetupError(f"the CUDA driver does not start: {error}") from None

    def __call__(self, name: str, *arguments: object) -> None:
        """Raises CudaError. The GIL is free meanwhile."""
        code = self._calls[name](*arguments)
        if code:
            raise CudaError(f"{name}: {self._error_name(code)}")

    def _error_name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._calls["cuGetErrorName"](code, ctypes.byref(text)) or text.value is None:
            return f"error {code}"
        return text.value.decode()


@functools.cache
def _driver() -> _Driver:
    return _Driver()


class CudaDevice:
    """Holds on to the device's primary context, which is the one that torch uses. Raises SetupError."""

    def __init__(self, index: int) -> None:
        """`index`: as torch counts the devices that this process sees."""
        self._call = _driver()
        device, context = _DEVICE(), _POINTER()
        try:
            self._call("cuDeviceGet", ctypes.byref(device), index)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        except CudaError as error:
            raise SetupError(f"cuda:{index}: {error}") from None
        self._device, self._context = device, context

    @contextlib.contextmanager
    def current(self) -> Generator[None, None, None]:
        """Makes the device current on this thread, and afterwards the one before it. Raises CudaError."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_POINTER()))

    def uuid(self) -> bytes:
        """UUID_BYTES that this device has in every process. Raises CudaError."""
        found = _Uuid()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(found), self._device)
        return bytes(found)

    def allocation(self, address: int) -> tuple[int, int]:
        """First address and bytes of the allocation around an address. Raises CudaError."""
        first, size = _ADDRESS(), _SIZE()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(size), address)
        return first.value, size.value

    def export(self, address: int) -> bytes:
        """Handle of HANDLE_BYTES, with which processes of this host map the allocation that begins at the
        address. Raises CudaError, for virtual memory management's allocations for one."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def map(self, handle: bytes) -> int:
        """Where another process's allocation begins here, until `unmap` has been called as often. It may be
        on another device. The driver keeps the memory meanwhile, even if that process ends. Raises
        CudaError."""
        address = _ADDRESS()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _IpcHandle.from_buffer_copy(handle),
            _LAZY_ENABLE_PEER_ACCESS,
        )
        return address.value

    def unmap(self, address: int) -> None:
        """Raises CudaError."""
        self._call("cuIpcCloseMemHandle", address)

    def make_stream(self) -> int:
        """Raises CudaError."""
        stream = _POINTER()
        self._call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def drop_stream(self, stream: int) -> None:
        """Raises CudaError."""
        self._call("cuStreamDestroy_v2", stream)

    def copy(self, stream: int, to: int, source: int, size_bytes: int) -> None:
        """Queue a copy between addresses of device memory. Raises CudaError."""
        self._call("cuMemcpyDtoDAsync_v2", to, source, size_bytes, stream)

    def wait(self, stream: int) -> None:
        """Returns when all that was queued is done. Raises CudaError, then nothing queued goes on."""
        self._call("cuStreamSynchronize", stream)

    def close(self) -> None:
        """Let go of the context. Raises CudaError."""
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)
