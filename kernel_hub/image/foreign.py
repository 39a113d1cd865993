"""Images that no manifest vouches for: a cubin, fatbin or PTX, each read and validated here.

Chooses among a fatbin's entries before the driver does, so that a refusal can name them all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..collection.resolve import Candidate, not_found, parse_target, ptx_refusal, refusal, resolve
from ..errors import CubinCorruptError, FunctionNotFoundError
from ..signature.function_spec import Chosen, FunctionSpec, spec_of
from ..signature.params import Param

if TYPE_CHECKING:  # the readers take milliseconds to import, and shipped cubins need none
    from ..cubin import FatbinEntry

PTX_FLOATS = {".f32": "float", ".f64": "double"}


class _Entry(NamedTuple):
    """Code or PTX for one target. `image` None: only the driver can unpack it.

    `unknown` is what the reader does not know of it, `unread` why it could not be read at all.
    """

    target: str
    minimum_driver: int
    image: bytes | None
    label: str
    specs: Mapping[str, FunctionSpec] = {}
    unknown: tuple[str, ...] = ()
    unread: str = ""


class ForeignImage:
    """A cubin, fatbin or PTX from anywhere.

    Raises CubinCorruptError for one that is damaged; for a fatbin where nothing in it can be read.
    What is wrong with one entry of several shows when that is the one to load.
    """

    def __init__(self, data: bytes, label: str) -> None:
        from ..cubin import image_kind, unwrap

        data = unwrap(data)
        self.label = label
        self._data = data
        self._key = hashlib.sha256(data).hexdigest()
        self._cubins: list[_Entry] = []
        self._texts: list[_Entry] = []
        self._unread: dict[str, str] = {}
        self._kind = image_kind(data)
        if self._kind == "cubin":
            self._cubins.append(_read_cubin(data))
        elif self._kind == "ptx":
            self._texts.append(_read_ptx(data))
        else:
            self._read_fatbin()
        entries = [*self._texts, *self._cubins]
        self._opaque = any(entry.image is None and not entry.unread for entry in entries)
        self._specs: dict[str, FunctionSpec] = {}
        for entry in entries:  # code after PTX: it knows registers too
            self._specs |= entry.specs

    def _read_fatbin(self) -> None:
        from ..cubin import read_fatbin

        seen = set()
        for entry in read_fatbin(self._data).entries:
            if entry.unread and not entry.damaged:
                self._unread[_name(entry)] = entry.unread
            elif (entry.kind, entry.target) not in seen:
                # Of several for one target the driver takes the first, too.
                seen.add((entry.kind, entry.target))
                kept = self._texts if entry.kind == "ptx" else self._cubins
                kept.append(_read_entry(entry))
        damaged = [entry for entry in [*self._cubins, *self._texts] if entry.unread]
        if damaged and len(damaged) == len(seen):
            raise CubinCorruptError(
                "no entry of the fatbin can be read: "
                + "; ".join(f"{entry.label}: {entry.unread}" for entry in damaged)
            )

    def names(self) -> Sequence[str] | None:
        return None if self._opaque and not self._specs else list(self._specs)

    def spec(self, name: str) -> FunctionSpec:
        if name in self._specs:
            return self._specs[name]
        if self._opaque:
            return FunctionSpec(name, "fatbin", None)
        raise FunctionNotFoundError.among(name, self._specs, self.label)

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        found = resolve(compute_capability, [Candidate(e.target, e.target) for e in self._cubins])
        if found.chosen is not None:
            (entry,) = [e for e in self._cubins if e.target == found.chosen.target]
            return self._chosen(entry, "cubin", "")
        rejected = dict(found.rejected)
        runs = []
        for entry in self._texts:
            reason = ptx_refusal(compute_capability, entry.target)
            if reason is None:
                runs.append(entry)
            else:
                rejected[entry.target.replace("sm_", "compute_")] = reason
        arch = "sm_{}{}".format(*compute_capability)
        if runs:
            newest = max(runs, key=lambda entry: parse_target(entry.target))
            return self._chosen(newest, "ptx", arch)
        for target, reason in self._unread.items():
            fell = refusal(compute_capability, target) if target.startswith("sm_") else None
            rejected.setdefault(target, fell or reason)
        build = {
            "cubin": f"Build it for this GPU: nvcc -cubin -arch={arch} …",
            "ptx": f"Build it for this GPU: nvcc -ptx -arch={arch.replace('sm', 'compute')} …",
            "fatbin": f"Build it with -gencode arch={arch.replace('sm', 'compute')},code={arch}, "
            "or with PTX for an earlier GPU.",
        }
        raise not_found(self.label, compute_capability, rejected, build=build[self._kind])

    def _chosen(self, entry: _Entry, kind: str, jit_target: str) -> Chosen:
        """`entry` goes to the driver by itself, if it can be had without the driver."""
        if entry.unread:
            raise CubinCorruptError(
                f"{self.label}: {entry.label} is not read, because {entry.unread}"
            )
        whole = entry.image is None
        image = self._data if entry.image is None else entry.image
        label = self.label
        if jit_target or self._kind == "fatbin":
            label += f" ({entry.label})"
        return Chosen(
            "/".join(filter(None, [self._key, "" if whole else entry.target, jit_target])),
            "fatbin" if whole else kind,
            label,
            lambda: image,
            entry.specs,
            entry.minimum_driver,
            False,
            jit_target,
            unknown=entry.unknown,
        )


def _name(entry: FatbinEntry) -> str:
    """`sm_61`, `lto_90`, or what an entry of no known kind says."""
    if entry.kind in ("cubin", "ptx"):
        return entry.target
    lto = entry.kind == "ltoir"
    return entry.target.replace("sm_", "lto_") if lto else f"{entry.kind} for {entry.target}"


def driver_floor(toolkit: tuple[int, int] | None) -> int:
    """The first driver that loads machine code of `toolkit`: 12000, that of CUDA 12.0, or later."""
    # Within a major version any driver loads the code of any toolkit.
    return 1000 * max(12, toolkit[0] if toolkit else 12)


def _read_entry(entry: FatbinEntry) -> _Entry:
    """An entry of a fatbin; `unread` says so when it holds something else than its header says."""
    from ..cubin import driver_of

    text = entry.kind == "ptx"
    label = "PTX {}.{} for ".format(*entry.version) * text + entry.target
    if text:
        floor = driver_of(entry.version)
    else:  # ABI 8 for these GPUs began with CUDA 13
        newer = entry.version == (1, 8) and entry.compute_capability < (10, 0)
        floor = 13000 if newer else 12000
    unread = _Entry(entry.target, floor, None, label, unread=entry.unread)
    if entry.image is None:
        return unread
    try:
        made = _read_ptx(entry.image) if text else _read_cubin(entry.image)
    except CubinCorruptError as error:
        return unread._replace(unread=str(error))
    # Cubins keep no 'f'.
    if made.target != entry.target.removesuffix("" if text else "f"):
        return unread._replace(unread=f"it holds {entry.kind} for {made.target}")
    return made._replace(target=entry.target)


def _read_cubin(data: bytes) -> _Entry:
    from ..cubin import read_cubin

    info = read_cubin(data)
    specs = {}
    for name, function in info.functions.items():
        params = [
            Param.make(p.ordinal, None, None, p.size_bytes, p.offset_bytes) for p in function.params
        ]
        specs[name] = spec_of(function, info.arch, params)
    return _Entry(info.target, driver_floor(info.toolkit), data, info.target, specs, info.unknown)


def _read_ptx(data: bytes) -> _Entry:
    from ..cubin import driver_of, read_ptx

    info = read_ptx(data)
    specs = {}
    for name, params in info.functions.items():
        made, offset = [], 0
        for index, param in enumerate(params):
            offset += -offset % max(param.align, 1)
            kind = PTX_FLOATS.get(param.type)
            made.append(Param.make(index, None, kind, param.size_bytes, offset))
            offset += param.size_bytes
        specs[name] = FunctionSpec(
            name,
            f"ptx {info.target}",
            tuple(made),
            required_block=info.required_blocks.get(name),
        )
    label = "PTX {}.{}".format(*info.version) + f" for {info.target}"
    return _Entry(info.target, driver_of(info.version), data, label, specs)
