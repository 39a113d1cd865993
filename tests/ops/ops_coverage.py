"""What ran of the ops in this process: kernels in the emulator, registered ops in opcheck.

Each test process reports once, at its end (tests/launch_coverage.py adds up and judges).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from emulated import RAN, SOURCES, CannotEmulateError, build

from kernel_hub import ops
from kernel_hub.collection.manifest import open_collection

# Names of the ops that torch.library.opcheck was given.
CHECKED: set[str] = set()
_opcheck = torch.library.opcheck


def _recording_opcheck(op: Any, *args: Any, **kwargs: Any) -> Any:
    found = _opcheck(op, *args, **kwargs)
    CHECKED.add(op.name() if hasattr(op, "name") else op._qualname)
    return found


torch.library.opcheck = _recording_opcheck


def module_of(op: str) -> ModuleType:
    """Where an op of `ops.__all__` is written."""
    return sys.modules[getattr(ops, op).__module__]


def cubins_of(op: str) -> list[str]:
    """The cubins of an op that the emulator can run: <module>*.cu, but for Hopper's."""
    stems = {module_of(name).__name__.rpartition(".")[2] for name in ops.__all__}
    own = module_of(op).__name__.rpartition(".")[2]
    found = []
    for cubin in SOURCES:
        owners = [stem for stem in stems if cubin == stem or cubin.startswith(f"{stem}_")]
        if owners and max(owners, key=len) == own and not cubin.endswith("_sm90"):
            found.append(cubin)
    return found


def report() -> tuple[list[str], list[str], str]:
    """What has to be done at least, what was done, and why something is not counted."""
    registered = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("kernel_hub::")]
    expected = [f"gave {name} to torch.library.opcheck" for name in registered]
    done = [f"gave {name} to torch.library.opcheck" for name in CHECKED]
    try:
        build("silu_and_mul")
    except CannotEmulateError as missing:
        return expected, done, f"kernels in the emulator are not counted: {missing}"
    shipped = open_collection("kernel_hub").manifest.cubins
    for op in ops.__all__:
        cubins = cubins_of(op)
        expected.append(f"ran a kernel of {op} in the emulator")
        if any(cubin in cubins for cubin, _ in RAN):
            done.append(expected[-1])
        for cubin in cubins:
            functions = next(iter(shipped[cubin].values())).functions if cubin in shipped else ()
            expected += [f"ran {name} in the emulator" for name in functions]
    done += [f"ran {name} in the emulator" for _, name in RAN]
    return expected, done, ""
