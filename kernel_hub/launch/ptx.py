"""PTX to machine code by the driver's own compiler: its log, and the result kept on disk.

Knows no library and no function; what comes back is a cubin for `_library` to load.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from ctypes import byref, c_int, c_size_t, c_void_p
from typing import NamedTuple

from .. import cache_folder
from ..driver import Driver
from ..errors import CubinCorruptError
from ..signature.function_spec import Chosen

_INFO, _INFO_BYTES, _ERROR, _ERROR_BYTES, _VERBOSE = 3, 4, 5, 6, 12
_INPUTS = {"ptx": 1, "fatbin": 2}
_LOG_BYTES = 1 << 16
# Part of each entry's key: another layout, or other options, is another entry.
_FORMAT = "kernel_hub jit 2: verbose"
_ALWAYS_UNKNOWN = (10, 0)  # of code for these GPUs the reader checks bounds alone
_LENGTH = struct.Struct("<I")


class LinkedCode(NamedTuple):
    """Machine code, and what the compiler said of it."""

    image: bytes
    log: str


def compile_ptx(driver: Driver, chosen: Chosen, image: bytes, device: int) -> LinkedCode:
    """Machine code of `image` (PTX, or a fatbin that holds it) for `device`: cached, or made now.

    Raises CudaDriverError with the compiler's log, lines numbered, when it is refused.
    """
    key = cache_folder.key(_FORMAT, chosen.kind, chosen.jit_target, driver.version, image)
    kept = cache_folder.load("ptx", key)
    if kept is not None:
        try:
            return _unpack(kept, chosen)
        except CubinCorruptError as error:
            cache_folder.discard("ptx", key, error)
    made = _link(driver, chosen, image, device)
    text = made.log.encode()
    entry = _LENGTH.pack(len(text)) + text + made.image
    # What our reader does not know of a later driver's code runs, and is not kept.
    with contextlib.suppress(CubinCorruptError):
        _unpack(entry, chosen)
        cache_folder.store("ptx", key, entry)
    return made


def _unpack(kept: bytes, chosen: Chosen) -> LinkedCode:
    """What `compile_ptx` stored, its code read whole: the driver gets nothing from disk unread.

    Raises CubinCorruptError for anything else, and for code of other functions than `chosen` has.
    """
    from ..cubin import read_cubin

    if len(kept) < _LENGTH.size:
        raise CubinCorruptError(f"it is {len(kept)} bytes")
    start = _LENGTH.size + _LENGTH.unpack_from(kept)[0]
    made = LinkedCode(kept[start:], kept[_LENGTH.size : start].decode(errors="replace"))
    info = read_cubin(made.image)
    if info.unknown and info.compute_capability < _ALWAYS_UNKNOWN:
        raise CubinCorruptError(f"it holds {'; '.join(info.unknown)}, unknown here")
    functions = info.functions
    for name, spec in chosen.functions.items():
        found = functions.get(spec.symbol or name)
        sizes = None if found is None else [param.size_bytes for param in found.params]
        if spec.params is not None and sizes != [param.size_bytes for param in spec.params]:
            raise CubinCorruptError(f"it holds no {spec.prototype()}")
    return made


def _link(driver: Driver, chosen: Chosen, image: bytes, device: int) -> LinkedCode:
    asked = f"compiling {chosen.label} for {chosen.jit_target}"
    info, errors = (ctypes.create_string_buffer(_LOG_BYTES) for _ in range(2))
    keys = (c_int * 5)(_INFO, _INFO_BYTES, _ERROR, _ERROR_BYTES, _VERBOSE)
    values = (c_void_p * 5)(
        ctypes.addressof(info), _LOG_BYTES, ctypes.addressof(errors), _LOG_BYTES, 1
    )
    text = image.rstrip(b"\0") + b"\0" if chosen.kind == "ptx" else image
    state, cubin, size = c_void_p(), c_void_p(), c_size_t()
    with driver.on_device(device):
        driver.call("cuLinkCreate_v2", len(keys), keys, values, byref(state), asked=asked)
        try:
            call, kind = "cuLinkAddData_v2", _INPUTS[chosen.kind]
            code = driver.try_call(call, state, kind, text, len(text), b"ptx", 0, None, None)
            if not code:
                call = "cuLinkComplete"
                code = driver.try_call(call, state, byref(cubin), byref(size))
            log = info.value.decode(errors="replace").strip()
            if code:
                said = errors.value.decode(errors="replace").strip() or log
                raise driver.error(call, code, asked + (f"\n  JIT log: {said}" if said else ""))
            return LinkedCode(ctypes.string_at(cubin.value or 0, size.value), log)
        finally:
            driver.try_call("cuLinkDestroy", state)
