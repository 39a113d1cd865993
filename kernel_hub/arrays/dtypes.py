"""Dtype tokens ('fp16', 'bf16', …) against NumPy, DLPack and the CUDA array interface.

bf16, e4m3 and e5m2 are NumPy types only where `ml_dtypes` is installed; else their raw bits are
uint16 or uint8 arrays.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

try:
    import numpy as np
except ImportError:  # the ops of a hub repository may not ask for it
    np = None  # type: ignore[assignment]

from ..errors import TensorError


class Dtype(NamedTuple):
    """One dtype: `numpy` is its name there, `raw` the unsigned integer or own type of its bits."""

    token: str
    size_bytes: int
    numpy: str
    raw: str
    dlpack_code: int

    @property
    def is_float(self) -> bool:
        """Whether it has a NaN."""
        return self.dlpack_code not in (0, 1, 6)


def _table() -> dict[str, Dtype]:
    rows = [
        Dtype("fp16", 2, "float16", "float16", 2),
        Dtype("fp32", 4, "float32", "float32", 2),
        Dtype("fp64", 8, "float64", "float64", 2),
        Dtype("bf16", 2, "bfloat16", "uint16", 4),
        Dtype("e4m3", 1, "float8_e4m3fn", "uint8", 10),
        Dtype("e5m2", 1, "float8_e5m2", "uint8", 12),
        Dtype("bool", 1, "bool", "bool", 6),
    ]
    for bits in (8, 16, 32, 64):
        rows.append(Dtype(f"int{bits}", bits // 8, f"int{bits}", f"int{bits}", 0))
        rows.append(Dtype(f"uint{bits}", bits // 8, f"uint{bits}", f"uint{bits}", 1))
    return {row.token: row for row in rows}


DTYPES = _table()
# NumPy's types, for isinstance; without NumPy nothing is one.
GENERIC, INTEGER, FLOATING, BOOL, NDARRAY = (
    getattr(np, name, ()) for name in ("generic", "integer", "floating", "bool_", "ndarray")
)
_BY_NUMPY_NAME = {row.numpy: row for row in DTYPES.values()}
_BY_DLPACK = {(row.dlpack_code, 8 * row.size_bytes): row for row in DTYPES.values()}


def of(dtype: Any) -> Dtype:
    """The dtype meant by a token, a NumPy dtype (or its name or scalar type), or a torch dtype."""
    if isinstance(dtype, Dtype):
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    name = str(dtype).removeprefix("torch.")
    if name not in _BY_NUMPY_NAME:
        try:
            name = np.dtype(dtype).name
        except (TypeError, AttributeError):  # no dtype; no NumPy
            pass
    if name in _BY_NUMPY_NAME:
        return _BY_NUMPY_NAME[name]
    raise TensorError(f"dtype {dtype!r} is not supported; the tokens are {', '.join(DTYPES)}")


def of_dlpack(code: int, bits: int, lanes: int, *, any_dtype: bool = False) -> Dtype:
    """The dtype of a DLDataType; any_dtype: one without a token has the token ''."""
    found = _BY_DLPACK.get((code, bits)) if lanes == 1 else None
    if found is None and any_dtype:
        return Dtype("", max(1, bits * lanes // 8), "", "", code)
    if found is None:
        raise TensorError(
            f"DLPack dtype (code {code}, {bits} bits, {lanes} lanes) is not supported; the tokens "
            f"are {', '.join(DTYPES)}"
        )
    return found


@functools.cache
def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """What `to_numpy` gives: the type itself, or that of its raw bits where NumPy lacks it."""
    try:
        return np.dtype(dtype.numpy)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype(dtype.raw)
    special: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.numpy))
    return special
