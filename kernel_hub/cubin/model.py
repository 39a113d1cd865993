"""What the readers of this package return: plain frozen dataclasses. Knows nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ParamInfo:
    """One kernel parameter as the cubin knows it: position, offset and size, no type."""

    ordinal: int
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True)
class FunctionInfo:
    """One kernel: its parameters, what it uses and what it demands of a launch.

    `max_threads` is the product of `__launch_bounds__`; `required_block` the blockDim it insists on
    (`.reqntid`); `cluster` the compiled-in cluster; `cooperative` is True when the code reads the
    grid workspace (grid.sync()).
    """

    name: str
    params: tuple[ParamInfo, ...]
    num_regs: int
    static_shared_bytes: int
    local_bytes: int
    max_threads: int | None
    required_block: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    max_cluster_rank: int | None
    cooperative: bool
    code_bytes: int


@dataclass(frozen=True)
class GlobalInfo:
    """A `__device__` or `__constant__` variable, the section it lives in and where in it."""

    name: str
    size_bytes: int
    section: str
    offset_bytes: int


@dataclass(frozen=True)
class SectionInfo:
    """One ELF section: where it is in the file and how large."""

    name: str
    offset: int
    size_bytes: int
    type: int
    flags: int


@dataclass(frozen=True)
class CubinInfo:
    """A validated cubin. `arch` is the folder token (`sm90`), `target` the build target (`sm_90a`).

    `toolkit` is (major, minor), None when the image does not say. `unknown` names what no toolkit
    known here writes, all of it in bounds: such an image is sound or not, only a driver can tell.
    """

    arch: str
    target: str
    compute_capability: tuple[int, int]
    arch_specific: bool
    os_abi: int
    abi_version: int
    toolkit: tuple[int, int] | None
    size_bytes: int
    functions: dict[str, FunctionInfo]
    globals: dict[str, GlobalInfo]
    sections: tuple[SectionInfo, ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class FatbinEntry:
    """One image of a fatbin: `kind` 'ptx', 'cubin' or 'ltoir'.

    `suffix` is 'a' for code of one exact architecture, 'f' for one of its family; `version` that of
    the PTX, else the fatbin writer's. `image` is None when only the driver can unpack it, and when
    `unread` says why it is not read at all; `damaged` where that is not for its kind or target.
    """

    kind: str
    compute_capability: tuple[int, int]
    suffix: str
    version: tuple[int, int]
    compressed: bool
    size_bytes: int
    image: bytes | None = field(repr=False)
    unread: str = ""
    damaged: bool = False

    @property
    def target(self) -> str:
        """`sm_90a`."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}{self.suffix}"


@dataclass(frozen=True)
class FatbinInfo:
    """The images of a fatbin, in file order."""

    entries: tuple[FatbinEntry, ...]


@dataclass(frozen=True)
class PtxParam:
    """One `.param` of a PTX entry: `type` as in PTX (`.u64`, `.b8`), whole size and alignment."""

    name: str
    type: str
    size_bytes: int
    align: int


@dataclass(frozen=True)
class PtxInfo:
    """The header of a PTX text and the parameters of each entry.

    `required_blocks` has the blockDim of those that insist on one (`.reqntid`).
    """

    version: tuple[int, int]
    target: str
    functions: dict[str, tuple[PtxParam, ...]]
    required_blocks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
