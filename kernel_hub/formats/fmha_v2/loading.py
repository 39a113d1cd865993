"""fmha_v2 kernels by what their names say, from a file or the arrays of one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import FunctionNotFoundError, ParamsError, listed
from ...kernel import Kernel, KernelFunction
from .. import carray
from .names import KernelName, parse_name

_BINARY = (".cubin", ".fatbin")


def load(source: Any) -> dict[KernelName, KernelFunction]:
    """The fmha_v2 kernels of a C source, a cubin, or what `carray.load` gave.

    Functions and arrays of other names are left out. Needs no GPU. Raises CubinNotFoundError,
    CubinCorruptError; FunctionNotFoundError when there is no fmha_v2 kernel.

        kernels = fmha_v2.load("fmha_v2_flash_attention_fp16_64_128_S_qkv_128_sm90.cubin.cpp")
        out = fmha_v2.run(fmha_v2.find(kernels, mask="causal"), qkv, cu_seqlens=cu_seqlens)
    """
    images: Mapping[str, Any]
    if isinstance(source, Mapping):
        images, label = source, "the images given"
    elif isinstance(source, (str, Path)):
        path, label = Path(source), str(source)
        images = {path.name: path} if path.suffix in _BINARY else carray.load(path)
    else:
        found = type(source).__name__
        raise ParamsError(f"source={source!r:.60}: a path or a dict of images, not {found}")
    kernels: dict[KernelName, KernelFunction] = {}
    others: list[str] = []
    for image in images.values():
        kernel = Kernel(image)
        for symbol in kernel.function_names:
            try:
                name = parse_name(symbol)
            except FunctionNotFoundError:
                others.append(symbol)
                continue
            kernels[name] = kernel[symbol]
    if not kernels:
        raise FunctionNotFoundError(f"no fmha_v2 kernel in {label}; it has: {listed(others, 8)}")
    return kernels


def find(kernels: Mapping[KernelName, KernelFunction], **fields: Any) -> KernelFunction:
    """The one kernel whose name has these fields: `find(kernels, mask="causal", head_dim=128)`.

    attributes: the name's own in any order; one may be given as a str.

    Raises FunctionNotFoundError when none has, or several have; ParamsError for an unknown field.
    """
    if not isinstance(kernels, Mapping) or not all(isinstance(k, KernelName) for k in kernels):
        found = type(kernels).__name__
        raise ParamsError(f"kernels={kernels!r:.60}: the dict that load() gave, not this {found}")
    named = [name for name in kernels if name.matches(**fields)]
    if len(named) == 1:
        return kernels[named[0]]
    asked = ", ".join(f"{field}={value!r}" for field, value in fields.items()) or "no field"
    have = listed(named or kernels, 8)
    raise FunctionNotFoundError(
        f"{len(named) or 'no'} kernels with {asked}; {'they are' if named else 'there are'}: {have}"
    )
