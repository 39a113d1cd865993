"""What Triton's json says of a compiled kernel, of any version from 3.0 on, each field checked.

Knows nothing of files, cubins or launches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import CubinCorruptError

_WARP_SIZE = 32
MAX_WARPS = 32  # 1,024 threads a block on every GPU so far
_MAX_CLUSTER = 16
_MAX_SHARED_BYTES = 1 << 24  # far above any GPU; the launch checks the GPU's own limit
_MAX_SCRATCH_BYTES = 1 << 30  # a block; descriptors take 128
_MAX_ALIGN = 1 << 20
_MAX_RANK = 5
_REQUIRED = object()
_KINDS = {int: "an int", bool: "true or false", str: "a string", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Descriptor:
    """How a host tensor descriptor is encoded for the TMA.

    elem_type: PTX's number of the element type; block: elements a tile, outermost first.
    """

    swizzle: int
    elem_bytes: int
    elem_type: int
    block: tuple[int, ...]


@dataclass(frozen=True)
class Metadata:
    """How a compiled Triton kernel is launched.

    label: where this was read, for messages. name: the function in the cubin. cluster: blocks a
    program, where more than one; the cubin says it too from Triton 3.6 on. num_hidden: pointers
    after the declared parameters.
    """

    label: str
    name: str
    compute_capability: tuple[int, int]
    num_warps: int
    cluster: tuple[int, int, int] | None = None
    cluster_is_compiled_in: bool = False
    shared_bytes: int = 0
    global_scratch_bytes: int = 0
    global_scratch_align: int = 1
    num_hidden: int = 0
    programmatic: bool = False
    cooperative: bool = False
    descriptors: tuple[Descriptor, ...] = ()
    triton_version: str | None = None

    @property
    def block_threads(self) -> int:
        """Threads a block."""
        return _WARP_SIZE * self.num_warps

    @property
    def num_ctas(self) -> int:
        """Blocks a program."""
        x, y, z = self.cluster or (1, 1, 1)
        return x * y * z

    @classmethod
    def from_json(cls, text: str | bytes, label: str) -> Metadata:
        """The json file Triton writes beside a cubin; `label` names it in messages."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CubinCorruptError(f"{label} is no JSON: {error}") from error
        return cls.from_mapping(found, label)

    @classmethod
    def from_mapping(cls, found: Any, label: str) -> Metadata:
        """The same as a dict, e.g. `compiled.metadata._asdict()`.

        Raises CubinCorruptError naming `label` and the field.
        """
        if not isinstance(found, Mapping):
            raise CubinCorruptError(
                f"{label} holds a {type(found).__name__}, not an object: Triton's metadata of a "
                "kernel is a JSON object"
            )
        field = _Fields(found, label)
        cluster = _cluster(field)
        if found.get("profile_scratch_size"):
            field.refuse(
                "profile_scratch_size",
                "the kernel was instrumented for Proton's profile, which is not collected here: "
                "compile it without",
            )
        align = field.number("global_scratch_align", 1, _MAX_ALIGN, 1)
        if align & (align - 1):
            field.refuse("global_scratch_align", "a power of two")
        version = found.get("triton_version")
        descriptors = found.get("tensordesc_meta")
        if descriptors is None:
            descriptors = []
        if not isinstance(descriptors, (list, tuple)):
            field.refuse("tensordesc_meta", "a list")
        return cls(
            label=label,
            name=field.get("name", str),
            compute_capability=_capability(field),
            num_warps=field.number("num_warps", 1, MAX_WARPS),
            cluster=cluster,
            cluster_is_compiled_in=cluster is not None and "cluster_dims" not in found,
            shared_bytes=field.number("shared", 0, _MAX_SHARED_BYTES),
            global_scratch_bytes=field.number("global_scratch_size", 0, _MAX_SCRATCH_BYTES, 0),
            global_scratch_align=align,
            # Triton 3.3 and 3.4 append one pointer, later ones two, earlier ones none.
            num_hidden=("global_scratch_size" in found) + ("profile_scratch_size" in found),
            programmatic=field.get("launch_pdl", bool, False),
            cooperative=field.get("launch_cooperative_grid", bool, False),
            descriptors=tuple(
                _descriptor(item, f"{label}: tensordesc_meta[{i}]")
                for i, item in enumerate(descriptors)
            ),
            triton_version=version if isinstance(version, str) else None,
        )


class _Fields:
    """Fields of a JSON object by name, each refused with the object's label and its own name."""

    def __init__(self, found: Mapping[str, Any], label: str) -> None:
        self.found, self.label = found, label

    def refuse(self, name: str, expected: str) -> NoReturn:
        raise CubinCorruptError(f"{self.label}: {name} is {self.found.get(name)!r:.80}; {expected}")

    def get(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        value = self.found.get(name, default)
        if value is _REQUIRED:
            raise CubinCorruptError(
                f"{self.label} has no {name!r}: it is not Triton's metadata of a kernel"
            )
        if type(value) is not kind:
            self.refuse(name, f"expected {_KINDS[kind]}")
        return value

    def number(self, name: str, low: int, high: int, default: Any = _REQUIRED) -> int:
        value = self.get(name, int, default)
        if not low <= value <= high:
            self.refuse(name, f"expected {low:,} to {high:,}")
        return int(value)


def _capability(field: _Fields) -> tuple[int, int]:
    target = field.found.get("target")
    if hasattr(target, "_asdict") or not isinstance(target, (Mapping, type(None))):
        # GPUTarget, as a compiled kernel's own metadata has it.
        target = {name: getattr(target, name, None) for name in ("backend", "arch", "warp_size")}
    if target is None:
        field.refuse("target", "expected an object with backend, arch and warp_size")
    inner = _Fields(target, f"{field.label}: target")
    if inner.get("backend", str) != "cuda":
        inner.refuse("backend", "only 'cuda' runs here")
    if inner.get("warp_size", int, _WARP_SIZE) != _WARP_SIZE:
        inner.refuse("warp_size", f"NVIDIA GPUs have {_WARP_SIZE}")
    return divmod(inner.number("arch", 50, 199), 10)


def _cluster(field: _Fields) -> tuple[int, int, int] | None:
    """From `cluster_dims` (3.0 to 3.5) or `num_ctas` (3.6 on); None for one block a program."""
    num_ctas = field.number("num_ctas", 1, _MAX_CLUSTER, 1)
    dims = field.found.get("cluster_dims", [num_ctas, 1, 1])
    if (
        not isinstance(dims, (list, tuple))
        or len(dims) != 3
        or any(type(part) is not int or not 1 <= part <= _MAX_CLUSTER for part in dims)
    ):
        field.refuse("cluster_dims", f"expected three ints from 1 to {_MAX_CLUSTER}")
    x, y, z = dims
    if x * y * z != num_ctas:
        field.refuse("cluster_dims", f"num_ctas is {num_ctas}: their product must be that")
    return (x, y, z) if num_ctas > 1 else None


def _descriptor(item: Any, label: str) -> Descriptor:
    if not isinstance(item, Mapping):
        raise CubinCorruptError(f"{label} is {item!r:.80}; expected an object")
    field = _Fields(item, label)
    if field.get("fp4_padded", bool, False):
        field.refuse("fp4_padded", "packed 4-bit tensors cannot be described here")
    if field.get("is_im2col", bool, False):
        field.refuse("is_im2col", "im2col descriptors cannot be made here, only tiled ones")
    block = field.get("block_size", list)
    if not 1 <= len(block) <= _MAX_RANK or any(
        type(part) is not int or not 1 <= part <= 256 for part in block
    ):
        field.refuse("block_size", f"expected 1 to {_MAX_RANK} ints from 1 to 256")
    elem_bytes = field.number("elem_size", 1, 8)
    return Descriptor(
        swizzle=field.number("swizzle", 0, 3),
        elem_bytes=elem_bytes,
        elem_type=field.number("elem_type", 0, 10),
        block=tuple(block),
    )
