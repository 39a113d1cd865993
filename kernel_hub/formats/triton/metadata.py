"""What Triton's json says of a compiled kernel, of any version from 2.1 on, each field checked.

What is damaged raises CubinCorruptError; what is whole and cannot be launched here (another
vendor's GPU, Triton 2.0, an instrumented kernel) CubinNotFoundError. Knows nothing of files,
cubins or launches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import CubinCorruptError, CubinNotFoundError

_WARP_SIZE = 32
MAX_WARPS = 32  # 1,024 threads a block on every GPU so far
_MAX_CLUSTER = 16
_MAX_SHARED_BYTES = 1 << 24  # far above any GPU; the launch checks the GPU's own limit
_MAX_SCRATCH_BYTES = 1 << 30  # a block; descriptors take 128
_MAX_ALIGN = 1 << 20
_MAX_RANK = 5
_REQUIRED = object()
_CLUSTER_FIELDS = {"cluster_dims", "clusterDims"}
# Fields that are there, and not empty, in kernels that take parameters nobody can pass here.
_UNSUPPORTED = {
    "profile_scratch_size": "the kernel was instrumented for Proton's profile, which is not "
    "collected here: compile it without",
    "tensormaps_info": "Triton 2.2's and 2.3's experimental TMA (ENABLE_TMA) is not launched here: "
    "compile it without, or with Triton 3.4 or later and tensor descriptors",
    "auto_tma_recipes": "TMA descriptors that fbtriton makes of plain pointers are not made here: "
    "compile it without TRITON_PROMOTE_LOAD_TO_TMA",
}
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

    label: where this was read, for messages. name: the function in the cubin. cluster: blocks that
    run together, where more than one; the cubin says it too from Triton 3.6 on. cluster_in_grid:
    the grid counts blocks, the cluster groups them (TLX's ctas_per_cga); else a program is a
    cluster. num_hidden: pointers after the declared parameters. descriptors: of each host tensor
    descriptor in order; None is one that the kernel takes as a pointer and numbers.
    """

    label: str
    name: str
    compute_capability: tuple[int, int]
    num_warps: int
    cluster: tuple[int, int, int] | None = None
    cluster_is_compiled_in: bool = False
    cluster_in_grid: bool = False
    shared_bytes: int = 0
    global_scratch_bytes: int = 0
    global_scratch_align: int = 1
    num_hidden: int = 0
    programmatic: bool = False
    cooperative: bool = False
    descriptors: tuple[Descriptor | None, ...] = ()
    triton_version: str | None = None

    @property
    def block_threads(self) -> int:
        """Threads a block."""
        return _WARP_SIZE * self.num_warps

    @property
    def num_ctas(self) -> int:
        """Blocks a cluster."""
        x, y, z = self.cluster or (1, 1, 1)
        return x * y * z

    @property
    def program_blocks(self) -> tuple[int, int, int]:
        """Blocks a program, in each direction of the grid."""
        return (1, 1, 1) if self.cluster is None or self.cluster_in_grid else self.cluster

    @property
    def maps(self) -> tuple[Descriptor, ...]:
        """The descriptors that the kernel takes as TMA descriptors."""
        return tuple(found for found in self.descriptors if found is not None)

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

        Raises CubinCorruptError naming `label` and the field, CubinNotFoundError for what is
        not launched here.
        """
        if not isinstance(found, Mapping):
            raise CubinCorruptError(
                f"{label} holds a {type(found).__name__}, not an object: Triton's metadata of a "
                "kernel is a JSON object"
            )
        field = _Fields(found, label)
        capability = _capability(field)
        _check_supported(field)
        cluster, cluster_in_grid = _cluster(field)
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
            compute_capability=capability,
            num_warps=field.number("num_warps", 1, MAX_WARPS),
            cluster=cluster,
            cluster_is_compiled_in=cluster is not None and not {*found} & _CLUSTER_FIELDS,
            cluster_in_grid=cluster_in_grid,
            shared_bytes=field.number("shared", 0, _MAX_SHARED_BYTES),
            global_scratch_bytes=field.number("global_scratch_size", 0, _MAX_SCRATCH_BYTES, 0),
            global_scratch_align=align,
            # Triton 3.3 and 3.4 append one pointer, later ones two, earlier ones none.
            num_hidden=("global_scratch_size" in found) + ("profile_scratch_size" in found),
            programmatic=field.get("launch_pdl", bool, False),
            cooperative=field.get("launch_cooperative_grid", bool, False),
            descriptors=tuple(
                None if item is None else _descriptor(item, f"{label}: tensordesc_meta[{i}]")
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

    def not_here(self, name: str, reason: str) -> NoReturn:
        found = self.found.get(name)
        raise CubinNotFoundError(f"{self.label}: {name} is {found!r:.80}; {reason}")

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


def _check_supported(field: _Fields) -> None:
    for name, reason in _UNSUPPORTED.items():
        if field.found.get(name):
            field.not_here(name, reason)
    modes = field.found.get("instrumentation_mode")
    if isinstance(modes, str) and "gsan" in modes:
        field.not_here("instrumentation_mode", "the global sanitizer's state is not passed here")


def _capability(field: _Fields) -> tuple[int, int]:
    found = field.found
    target = found.get("target")
    if hasattr(target, "_asdict") or not isinstance(target, (Mapping, list, type(None))):
        # GPUTarget, as a compiled kernel's own metadata has it.
        target = {name: getattr(target, name, None) for name in ("backend", "arch", "warp_size")}
    if target is None and "ctime" in found:
        raise CubinNotFoundError(
            f"{field.label} was written by Triton 2.0, which says neither the GPU nor its "
            "version: kernels of Triton 2.1 and later are loaded, compile it with one"
        )
    if target is None and {"arch", "device_type"} <= found.keys():  # Triton 2.1
        target = {"backend": found["device_type"], "arch": found["arch"]}
    elif isinstance(target, list) and len(target) == 2:  # 2.3
        target = {"backend": target[0], "arch": target[1]}
    elif isinstance(target, Mapping) and "capability" in target and "backend" not in target:  # 2.2
        target = {"backend": found.get("device_type", "cuda"), "arch": target["capability"]}
    if not isinstance(target, Mapping):
        field.refuse("target", "expected an object with backend, arch and warp_size")
    inner = _Fields(target, f"{field.label}: target")
    if inner.get("backend", str) != "cuda":
        inner.not_here("backend", "only 'cuda' runs here")
    if inner.get("warp_size", int, _WARP_SIZE) != _WARP_SIZE:
        inner.refuse("warp_size", f"NVIDIA GPUs have {_WARP_SIZE}")
    return divmod(inner.number("arch", 50, 199), 10)


def _cluster(field: _Fields) -> tuple[tuple[int, int, int] | None, bool]:
    """(blocks a cluster or None for single ones, whether the grid counts blocks).

    From `num_ctas`, with `clusterDims` (2.2), `cluster_dims` (2.3 to 3.5, fbtriton) or neither (3.6
    on); TLX's `ctas_per_cga` groups the blocks of a grid.
    """
    num_ctas = field.number("num_ctas", 1, _MAX_CLUSTER, 1)
    given = field.found.get("ctas_per_cga")
    in_grid = given is not None
    name = "ctas_per_cga" if in_grid else "cluster_dims"
    if not in_grid and name not in field.found and "clusterDims" in field.found:
        name = "clusterDims"
    dims = given if in_grid else field.found.get(name, [num_ctas, 1, 1])
    if (
        not isinstance(dims, (list, tuple))
        or len(dims) != 3
        or any(type(part) is not int or not 1 <= part <= _MAX_CLUSTER for part in dims)
    ):
        field.refuse(name, f"expected three ints from 1 to {_MAX_CLUSTER}")
    x, y, z = dims
    if x * y * z != num_ctas and not (in_grid and num_ctas == 1 and x * y * z <= _MAX_CLUSTER):
        field.refuse(name, f"num_ctas is {num_ctas}: their product must be that")
    return ((x, y, z) if x * y * z > 1 else None), in_grid


def _descriptor(item: Any, label: str) -> Descriptor:
    if not isinstance(item, Mapping):
        raise CubinCorruptError(f"{label} is {item!r:.80}; expected an object")
    field = _Fields(item, label)
    if field.get("fp4_padded", bool, False):
        field.not_here("fp4_padded", "packed 4-bit tensors cannot be described here")
    if field.get("is_im2col", bool, False):
        field.not_here("is_im2col", "im2col descriptors cannot be made here, only tiled ones")
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
