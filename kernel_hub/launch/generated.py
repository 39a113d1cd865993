"""The text of a launcher: one Python function generated for one signature, and its names.

Checks stand in line and in the order of cost; whatever is not a plain number or a torch tensor of
the declared dtype goes to the careful converter of its parameter.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..arrays import interop
from ..driver import Driver
from ..driver.stream_order import Order
from ..errors import ParamsError
from ..signature.params import OtherDeviceError, Param, ordered, scattered, wrong_count
from .geometry import NOT_GIVEN, check_keywords, check_shared, one_shared

STREAM_AT = 32  # of CUlaunchConfig
PARAMS_AT = 64
_NO_TORCH = type("_NoTorch", (), {})  # stands for torch's types while torch is not loaded
PACK_ERRORS = (struct.error, OverflowError)

# **options and not keyword-only names: five absent ones cost a dict look-up each (60 ns).
_GIVEN = f"gridDim=..., blockDim=..., sharedMemBytes={NOT_GIVEN}, stream=None, params=()"
SIGNATURE = f"{_GIVEN}, *more, **options"


def launcher_source(
    params: Sequence[Param], *, many_devices: bool, blocking: bool, watch_torch: bool
) -> str:
    """The text of the launcher for one signature; `fixed_names` and `torch_names` fill its names.

    watch_torch: torch is not loaded yet; the launcher is made anew once it is.
    """
    device = "device" if many_devices else "0"
    names = [f"a{param.position}" for param in params]
    lines = [f"def launch({SIGNATURE}):"]
    add = lines.append
    wrong = "wrong_launch(params, expected, sharedMemBytes, options, more)"
    add("    if more:")
    add(f"        raise {wrong}")
    if watch_torch:
        add("    if loaded_torch() is not None:")
        add(
            "        torch_appeared(params, stream)(gridDim, blockDim, sharedMemBytes, stream, "
            "params, **options)"
        )
        add("        return")
    add("    if type(params) is not tuple and type(params) is not list:")
    add("        params = ordered(params, expected)")
    if names:
        add("    try:")
        add(f"        {', '.join(names)}, = params")
        add("    except ValueError:")
        add(f"        raise {wrong} from None")
    else:
        add("    if params:")
        add(f"        raise {wrong}")
    if many_devices:
        pointers = [param for param in params if _may_be_pointer(param)]
        first = f"a{pointers[0].position}" if pointers else ""
        quick = f"{first}.get_device() if type({first}) is Tensor and {first}.is_cuda else "
        add(f"    device = {quick if first else ''}device_of(params)")
        add("    state = states.get(device) or load(device, stream)")
        add("    plain = state.plain")
        add("    function = state.argument")
    add("    if stream is None:")
    add(f"        stream = current_stream({device})")
    add("    elif type(stream) is not int:")
    add(f"        stream = stream_handle(stream, {device})")
    add(f"    if stream and stream not in {'state.' * many_devices}streams:")
    add("        state.admit(stream)")
    lines += _argument_lines(params, device, many_devices)
    add("    if options:")
    add("        if 'sharedMem' in options:")
    add("            sharedMemBytes = one_shared(sharedMemBytes, options, state.limits.function)")
    add("        pool = state.options_pool(**options)")
    add("    else:")
    add("        pool = plain")
    add("    try:")
    add("        slot = pool.pop()")
    add("    except IndexError:")
    add("        slot = state.new_slot(pool)")
    add("    grid, block, shared, buffer, pack, config, values = slot")
    add(
        "    if grid is not gridDim or block is not blockDim or ("
        "shared is not sharedMemBytes and (shared != sharedMemBytes "
        "if type(sharedMemBytes) is int or sharedMemBytes is False else True)):"
    )
    add("        state.shape(pool, slot, gridDim, blockDim, sharedMemBytes)")
    add("    try:")
    add(f"        pack(buffer, {STREAM_AT}, {', '.join(['stream', *names])})")
    add("    except PACK_ERRORS:")
    add(f"        raise explain(params, expected, stream, {device}) from None")
    if many_devices:
        # A NULL stream means the current context, which may be another device's.
        add("    if not stream and current_context() != state.context:")
        add("        call = launch_ex, config, function, values, None")
        add("        code = driver.within(device, call, relaxed=False)[1]")
        add("    else:")
        add("        code = launch_ex(config, function, values, None)")
    else:
        add("    code = launch_ex(config, function, values, None)")
    add("    if code:")
    add("        state.recover(code, slot, stream)")
    if blocking:
        add("    state.finish(slot, stream)")
    add("    pool.append(slot)")
    return "\n".join(lines) + "\n"


SCATTERED = (
    "    except OtherDeviceError as error:",
    "        raise scattered(error, expected, params)",
)


def _may_be_pointer(param: Param) -> bool:
    return param.is_pointer or (param.info is None and param.size_bytes == 8)


def _argument_lines(params: Sequence[Param], device: str, many_devices: bool) -> list[str]:
    """Each value checked in line where it is a torch tensor or a plain number, else converted.

    No type check on tensors: what has torch's dtype object, is_cuda and data_ptr is one, and an
    object without these attributes lands in `convert_all`.
    """
    pointers, others = [], []
    for param in params:
        name = f"a{param.position}"
        convert = f"convert{param.position}({name}, {device}, stream)"
        info = param.info
        if _may_be_pointer(param):
            checks = [f"{name}.get_device() == device" if many_devices else f"{name}.is_cuda"]
            if info is not None and info.dtype:
                checks.insert(0, f"{name}.dtype is dtype{param.position}")
            # A null pointer is an empty tensor or freed storage: the converter tells them apart.
            quick = f"{name}.data_ptr() or {convert} if {' and '.join(checks)} else {convert}"
            none = "0 if " + name + " is None else " if param.is_pointer else ""
            pointers.append(f"        {name} = {none}{quick}")
        elif info is not None and info.kind in ("int", "uint"):
            others += [f"    if type({name}) is not int:", f"        {name} = {convert}"]
        elif info is not None and info.kind == "float" and info.struct_code:
            others += [f"    if type({name}) is not float:", f"        {name} = {convert}"]
        else:
            others.append(f"    {name} = {convert}")
    if not pointers:
        return others
    names = ", ".join(f"a{param.position}" for param in params)
    return [
        "    try:",
        *pointers,
        "    except AttributeError:",
        f"        {names}, = convert_all(expected, params, {device}, stream)",
        *(
            [
                "    except OtherDeviceError as error:",
                "        raise scattered(error, expected, params)",
            ]
            if many_devices
            else []
        ),
        "    else:" if others else "",
        *("    " + line for line in others),
    ]


def convert_all(
    order: Order, expected: Sequence[Param], params: Sequence[Any], device: int, stream: int
) -> list[Any]:
    """Every value by its careful converter."""
    try:
        return [
            param.convert(value, device, stream, order)
            for param, value in zip(expected, params, strict=True)
        ]
    except OtherDeviceError as error:
        raise scattered(error, expected, params) from None


def wrong_launch(
    function: str,
    params: Sequence[Any],
    expected: Sequence[Param],
    sharedMemBytes: Any,
    options: dict[str, Any],
    more: Sequence[Any],
) -> Exception:
    """What is wrong with a launch whose arguments are too many, or whose params are."""
    if more:
        return ParamsError(
            f"{function} got {5 + len(more)} arguments by position, it takes 5: gridDim, blockDim, "
            "sharedMemBytes, stream, params; the kernel's own go in params, as one tuple: "
            "f(gridDim, blockDim, 0, None, (out, x, …))"
        )
    check_keywords(function, options)
    if not len(params):
        check_shared(sharedMemBytes, function)
    return wrong_count(params, expected)


def explain(
    params: Sequence[Any], expected: Sequence[Param], stream: int, device: int
) -> Exception:
    """Why packing failed: the careful converters find the value that does not fit."""
    for param, value in zip(expected, params, strict=True):
        param.convert(value, device)
    interop.stream_handle(stream, device)
    return ParamsError(f"the parameters {params!r} cannot be packed")


def torch_names(params: Sequence[Param]) -> dict[str, Any]:
    """The names of the launcher that depend on whether torch is loaded."""
    torch = interop.loaded_torch()
    names: dict[str, Any] = {
        "Tensor": torch.Tensor if torch else _NO_TORCH,
        "current_stream": interop.raw_stream_getter() or interop.current_stream,
    }
    for param, dtype in zip(params, torch_dtypes(params), strict=True):
        if dtype is not None:
            names[f"dtype{param.position}"] = dtype
    return names


def torch_dtypes(params: Sequence[Param]) -> list[Any]:
    """The torch dtype of each parameter's tensor; None where any goes."""
    tokens = [
        param.info.dtype if param.info is not None and _may_be_pointer(param) else None
        for param in params
    ]
    known = {token: interop.torch_dtype(token) or _NO_TORCH for token in {*tokens} if token}
    return [known.get(token) if token else None for token in tokens]


def fixed_names(driver: Driver, params: Sequence[Param]) -> dict[str, Any]:
    """The names of the launcher that never change."""
    order = Order(driver)
    names: dict[str, Any] = {
        "expected": params,
        "ordered": ordered,
        "OtherDeviceError": OtherDeviceError,
        "scattered": scattered,
        "stream_handle": interop.stream_handle,
        "loaded_torch": interop.loaded_torch,
        "explain": explain,
        "one_shared": one_shared,
        "convert_all": partial(convert_all, order),
        "PACK_ERRORS": PACK_ERRORS,
        "launch_ex": driver.launch_ex,
        "driver": driver,
        "current_context": driver.current_context,
    }
    names.update({f"convert{p.position}": partial(p.convert, order=order) for p in params})
    return names
