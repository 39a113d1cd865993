"""Launch parameters: from Python values to the bytes a kernel reads.

One `Param` a kernel parameter. `convert` takes a value of any supported kind and returns what
`struct.pack_into` wants for that parameter, or raises ParamsError with index, name, what came and
what the kernel takes. `launch.generated` makes the quick path around it.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ..arrays.dtypes import GENERIC
from ..arrays.interop import ArrayView, describe
from ..errors import KernelHubError, ParamsError, TensorError
from .c_types import TypeInfo, canonical, type_info

_CTYPES_KIND = {
    **dict.fromkeys("bhilq", "int"),
    **dict.fromkeys("BHILQ", "uint"),
    **dict.fromkeys("fd", "float"),
    "?": "bool",
    "c": "int",
    "P": "pointer",
    "z": "pointer",
    "Z": "pointer",
}
_NUMPY_KIND = {"i": "int", "u": "uint", "f": "float", "b": "bool"}
_RAW_CODE = {1: "B", 2: "H", 4: "I", 8: "Q"}
_INTEGERS = {
    getattr(ctypes, f"c_{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_OF_ANY_KIND = {*_INTEGERS, ctypes.c_void_p, ctypes.c_float, ctypes.c_double, ctypes.c_bool}
_UNSIGNED_TWIN = {"int8": "uint8", "int16": "uint16", "int32": "uint32", "int64": "uint64"}
_BF16_MOST = (2 - 2**-8) * 2.0**127  # from its upper half on, the last step rounds to inf
# (device, stream of the launch, stream of an array's own work or None) -> see `tensors.Ready`.
OrderStreams = Callable[[int, int, int | None], int]
WAYS_OUT = (
    "give its width: a ctypes or NumPy scalar (ctypes.c_int(3), numpy.float32(0.5)), or declare "
    "the types once with Kernel(..., signatures={function: ['float*', 'int', …]})"
)


class OtherDeviceError(ParamsError):
    """An array on another device than the launch's; `scattered` says where all of them are."""


class Param(NamedTuple):
    """One parameter of a kernel. `type` None: only the size is known (a foreign cubin)."""

    position: int
    name: str
    type: str | None
    size_bytes: int
    offset_bytes: int
    info: TypeInfo | None = None
    # ctypes classes whose bytes are what the kernel reads.
    scalars: frozenset[Any] = frozenset()

    @classmethod
    def make(
        cls, index: int, name: str | None, type_text: str | None, size_bytes: int, offset: int
    ) -> Param:
        """A parameter; a declared type whose size disagrees with the image's is refused."""
        spelled, info, scalars = _known(type_text, size_bytes)
        if info is not None and info.size_bytes != size_bytes:
            raise ParamsError(
                f"parameter {index} is declared {type_text} ({info.size_bytes} bytes) but the "
                f"kernel takes {size_bytes} bytes there"
            )
        return cls(index, name or f"arg{index}", spelled, size_bytes, offset, info, scalars)

    @classmethod
    def make_all(cls, rows: Sequence[tuple[str, str, int, int]]) -> tuple[Param, ...]:
        """`make` of each (name, type, size_bytes, offset_bytes), by columns."""
        names, types, sizes, offsets = [*zip(*rows, strict=True)] or [()] * 4
        spelled, infos, scalars = [*zip(*map(_known, types, sizes), strict=True)] or [()] * 3
        pairs = zip(infos, sizes, strict=True)
        if not all(names) or any(info and info.size_bytes != size for info, size in pairs):
            return tuple([cls.make(i, *row) for i, row in enumerate(rows)])
        columns = range(len(rows)), names, spelled, sizes, offsets, infos, scalars
        return tuple(map(_new_param, zip(*columns, strict=True)))

    @property
    def is_pointer(self) -> bool:
        """Declared a pointer."""
        return self.info is not None and self.info.kind == "pointer"

    @property
    def code(self) -> str:
        """The struct code this parameter is packed with."""
        if self.info is not None and self.info.struct_code:
            return self.info.struct_code
        return _RAW_CODE.get(self.size_bytes, f"{self.size_bytes}s")

    def __str__(self) -> str:
        kind = self.type or f"<{self.size_bytes} bytes>"
        return f"{kind} {self.name}"

    def refuse(self, found: str, advice: str = "") -> ParamsError:
        """The error for a value that does not fit here."""
        takes = (
            f"{self.type} ({self.size_bytes} bytes)" if self.type else f"{self.size_bytes} bytes"
        )
        text = f"params[{self.position}] ({self.name}): the kernel takes {takes}, got {found}"
        return ParamsError(f"{text}; {advice}" if advice else text)

    def convert(
        self,
        value: Any,
        device: int | None = None,
        stream: int = 0,
        order: OrderStreams | None = None,
    ) -> Any:
        """`value` as struct.pack_into takes it.

        device: where arrays must live, None = anywhere. stream: where the launch will use them.
        order: makes the work of an array's own stream come first.
        """
        if type(value) in self.scalars:
            signed = self.info is not None and self.info.kind == "int"
            return int.from_bytes(value, "little", signed=signed)
        if hasattr(type(value), "__cuda_array_interface__"):  # nothing else to be
            return self._convert_array(value, device, stream, order)
        if value is None:
            if self.is_pointer or (self.info is None and self.size_bytes == 8):
                return 0
            raise self.refuse("None", "None is a null pointer")
        if isinstance(value, (bool, int, float)) and not isinstance(value, GENERIC):
            return self._convert_python(value)
        if isinstance(value, (bytes, bytearray, memoryview)):
            return self._raw(bytes(value), "bytes")
        if isinstance(value, GENERIC):
            return self._convert_numpy(value)
        if isinstance(value, (ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array)):
            return self._convert_ctypes(value)
        if isinstance(value, ctypes._Pointer):
            return self._raw(bytes(value), type(value).__name__)
        as_bytes = getattr(value, "_as_bytes", None)
        if as_bytes is not None:  # TensorMap
            packed = self._raw(as_bytes(), type(value).__name__)
            value._record_use(stream)
            return packed
        return self._convert_array(value, device, stream, order)

    def _convert_array(
        self, value: Any, device: int | None, stream: int, order: OrderStreams | None
    ) -> int:
        ready = None if order is None or device is None else partial(order, device, stream)
        try:
            view = describe(value, ready)
        except TensorError as error:
            if self.info is not None and self.info.kind not in ("pointer", "struct"):
                found = f"a {type(value).__name__} {_short(value)}"
                raise self.refuse(found, "pass its value: .item() gives it") from error
            raise self.refuse(str(error)) from error
        except (KeyError, IndexError, TypeError, ValueError) as error:
            found = f"{type(value).__name__} whose array interface is malformed ({error!r})"
            raise self.refuse(found) from error
        if view is None:
            raise self.refuse(
                f"{type(value).__name__} {_short(value)}",
                "pass a tensor, a DeviceArray, a NumPy or ctypes scalar, or a Python number",
            )
        address = self._address(view, value, device)
        if (record := getattr(value, "_record_use", None)) is not None:  # DeviceArray
            record(stream)
        return address

    def _address(self, view: ArrayView, value: Any, device: int | None) -> int:
        info = self.info
        expected = info.dtype if info is not None else None
        wrong_kind = info is not None and info.kind != "pointer"
        wrong_dtype = expected and view.dtype and not _same_dtype(expected, view.dtype)
        elsewhere = device is not None and view.device is not None and view.device != device
        if not (wrong_kind or wrong_dtype or elsewhere) and self.size_bytes == 8:
            if not 0 <= view.address < 1 << 64:
                raise self.refuse(f"{type(value).__name__} at {view.address}, which is no address")
            return view.address
        what = f"{type(value).__name__} of {view.dtype or 'unknown dtype'} {list(view.shape)}"
        if wrong_kind:
            raise self.refuse(what, "pass a number here (tensor.item() copies one to the CPU)")
        if self.size_bytes != 8:
            raise self.refuse(what, "a pointer has 8 bytes")
        if wrong_dtype:
            raise self.refuse(what, f"convert it to {expected} first")
        found = f"{what} on device {view.device}"
        raise OtherDeviceError(str(self.refuse(found, f"this launch is on device {device}")))

    def _convert_python(self, value: Any) -> Any:
        info = self.info
        found = f"{type(value).__name__} {value!r}"
        if info is None:
            raise self.refuse(found, f"its type is not known from the cubin: {WAYS_OUT}")
        if info.kind == "pointer":
            raise self.refuse(found, "an address goes in as ctypes.c_void_p(address), null as None")
        if info.kind == "struct":
            raise self.refuse(found, "pass a TensorMap, a ctypes Structure or bytes")
        if info.kind == "float":
            try:
                return self._pack_float(float(value), found)
            except OverflowError:  # an int beyond every float
                raise self.refuse(_short(value), f"it overflows {self.type}") from None
        if isinstance(value, float):
            raise self.refuse(found, "a float does not go into an integer")
        if info.kind == "bool":
            if value not in (0, 1):
                raise self.refuse(found)
            return bool(value)
        bits = 8 * self.size_bytes
        low, high = (
            (0, 2**bits - 1) if info.kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        )
        if not low <= value <= high:
            raise self.refuse(found, f"the range is {low} … {high}")
        return int(value)

    def _pack_float(self, value: float, found: str) -> Any:
        if self.info is not None and self.info.struct_code:
            try:
                struct.pack("<" + self.info.struct_code, value)
            except (OverflowError, struct.error):
                raise self.refuse(found, f"it overflows {self.type}") from None
            return value
        if self.info is not None and self.info.dtype == "bf16":
            if abs(value) >= _BF16_MOST and not math.isinf(value):
                raise self.refuse(found, f"it overflows {self.type}")
            return bfloat16_bits(value)
        raise self.refuse(found, f"Python has no {self.type}: pass its raw bytes")

    def _convert_numpy(self, value: Any) -> Any:
        if value.dtype.kind in "OSUMmT":
            found = f"numpy.{value.dtype.name} {_short(value)}"
            raise self.refuse(found, "a text, a date or an object is no number")
        if self.info is not None and self.info.kind != "struct":
            kind = _NUMPY_KIND.get(value.dtype.kind, value.dtype.name)
            self._check_kind(kind, value.dtype.itemsize, f"numpy.{value.dtype.name} {value!r}")
        return self._raw(value.tobytes(), f"numpy.{value.dtype.name} {value!r}")

    def _convert_ctypes(self, value: Any) -> Any:
        name = type(value).__name__
        code = getattr(type(value), "_type_", None)
        if self.info is not None and self.info.kind != "struct" and isinstance(code, str):
            self._check_kind(
                _CTYPES_KIND.get(code, name), ctypes.sizeof(value), f"{name} {value!r}"
            )
        return self._raw(bytes(value), name)

    def _check_kind(self, kind: str, size_bytes: int, found: str) -> None:
        assert self.info is not None
        wanted = self.info.kind
        integers = ("int", "uint", "bool")
        fits = kind == wanted or (kind in integers and wanted in integers)
        if wanted == "pointer":  # a raw 64-bit address, its maker vouches for it
            fits = kind in ("pointer", "uint", "int")
        if not fits or size_bytes != self.size_bytes:
            number = {**dict.fromkeys(integers, "int"), "float": "float"}.get(wanted)
            advice = f"{number}(value) goes in, or a scalar of {self.size_bytes} bytes"
            raise self.refuse(f"{found} ({size_bytes} bytes)", advice if number else "")

    def _raw(self, data: bytes, found: str) -> Any:
        if len(data) != self.size_bytes:
            raise self.refuse(f"{found} of {len(data)} bytes")
        code = self.code
        return data if code.endswith("s") else struct.unpack(f"<{code}", data)[0]


# `Param(*row)`, without a line of Python.
_new_param: Any = partial(tuple.__new__, Param)


@lru_cache(maxsize=256)  # of a kernel's sixty most are alike
def _known(
    type_text: str | None, size_bytes: int
) -> tuple[str | None, TypeInfo | None, frozenset[type]]:
    """(its one spelling, what is known of the type, `Param.scalars`)."""
    info = type_info(type_text) if type_text else None
    kinds = {None: _OF_ANY_KIND, "pointer": {ctypes.c_void_p}, "int": _INTEGERS, "uint": _INTEGERS}
    scalars = kinds.get(info.kind if info else None, ())
    spelled = canonical(type_text) if type_text else None
    return spelled, info, frozenset(c for c in scalars if ctypes.sizeof(c) == size_bytes)


def _same_dtype(expected: str, found: str) -> bool:
    # torch has few unsigned types, so integers of one width pass for each other.
    byte = ("bool", "uint8")
    twin = _UNSIGNED_TWIN
    return (
        expected == found
        or twin.get(expected, expected) == twin.get(found, found)
        or (expected in byte and found in byte)
    )


def bfloat16_bits(value: float) -> int:
    """The bits of `value` as bfloat16, rounded to nearest even."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        return (bits >> 16) | 0x40
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def ordered(params: Any, expected: Sequence[Param]) -> Sequence[Any]:
    """`params` as a sequence in the kernel's order; a dict goes by parameter name."""
    if isinstance(params, Mapping):
        names = [param.name for param in expected]
        missing = [name for name in names if name not in params]
        unknown = [str(name) for name in params if name not in names]
        if missing or unknown:
            parts = []
            if missing:
                parts.append(f"missing {', '.join(missing)}")
            if unknown:
                parts.append(f"unknown {', '.join(unknown)}")
            raise ParamsError(f"params by name: {'; '.join(parts)}; {takes(expected)}")
        return [params[name] for name in names]
    if (
        isinstance(params, (str, bytes, Set))
        or not hasattr(params, "__iter__")
        or hasattr(params, "shape")
    ):
        raise ParamsError(
            f"params is a {type(params).__name__}, not a list, tuple or dict of parameters; "
            + takes(expected)
        )
    return list(params)


def takes(expected: Sequence[Param]) -> str:
    """'the kernel takes 3: float* out, …' for messages."""
    return f"the kernel takes {len(expected)}: {', '.join(map(str, expected)) or 'nothing'}"


def wrong_count(found: Sequence[Any], expected: Sequence[Param]) -> ParamsError:
    """The error for too few or too many parameters."""
    kind = "few" if len(found) < len(expected) else "many"
    return ParamsError(f"too {kind} params: got {len(found)}, {takes(expected)}")


def scattered(
    error: OtherDeviceError, expected: Sequence[Param], params: Sequence[Any]
) -> ParamsError:
    """`error` with the device of every array: none of them is the one to blame."""
    places: dict[int, list[str]] = {}
    for param, value in zip(expected, params, strict=True):
        try:
            view = describe(value) if param.info is None or param.is_pointer else None
        except (KernelHubError, LookupError, TypeError, ValueError):
            continue
        if view is not None and view.device is not None:
            places.setdefault(view.device, []).append(param.name)
    if len(places) < 2:
        return ParamsError(str(error))
    there = "; ".join(f"{', '.join(names)} on {device}" for device, names in sorted(places.items()))
    return ParamsError(f"{error}. All arrays of a launch lie on one device, here: {there}")


def layout(params: Sequence[Param], base: int) -> tuple[str, list[int], int]:
    """(struct format of the values, each one's offset in the buffer, buffer end).

    Values lie one after another, each aligned to its size up to 64 bytes; the driver copies each
    from the address it is given, so these offsets are ours and not the cubin's.
    """
    text, offsets, position = "", [], base
    for param in params:
        align = min(param.size_bytes & -param.size_bytes, 64) if param.size_bytes else 1
        pad = -position % align
        text += f"{pad}x" * bool(pad) + param.code
        offsets.append(position + pad)
        position += pad + param.size_bytes
    return text, offsets, position


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
