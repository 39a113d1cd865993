"""GPU code as other projects keep it, turned into images that `Kernel` takes, and ours for them.

One module or room a format, found when it is asked for: `carray` holds arrays in C sources,
`triton` Triton's kernels, `fmha_v2` TensorRT-LLM's attention, `c_export` ours as C. The runtime
imports none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import c_export as c_export
    from . import carray as carray
    from . import fmha_v2 as fmha_v2
    from . import triton as triton

__all__ = ["c_export", "carray", "fmha_v2", "triton"]


if not TYPE_CHECKING:  # to which every name would be there

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
