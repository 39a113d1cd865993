"""What Kernel knows of an image and its functions before it loads them. Reads nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..collection.manifest import FunctionEntry, LaunchFacts
from .params import Param

if TYPE_CHECKING:  # the reader takes milliseconds to import, and shipped cubins need none
    from ..cubin import FunctionInfo


class FunctionSpec(NamedTuple):
    """What is known of one function. `params` None: an image only the driver can read."""

    name: str
    arch: str
    params: tuple[Param, ...] | None
    num_regs: int | None = None
    static_shared_bytes: int | None = None
    local_bytes: int | None = None
    max_threads: int | None = None
    required_block: tuple[int, int, int] | None = None
    cluster: tuple[int, int, int] | None = None
    symbol: str | None = None  # its name in the image, where it is offered under another
    launch: LaunchFacts | None = None  # what its source states of launches, where it does

    def prototype(self) -> str:
        """`name(float* out, int n)`."""
        params = "…" if self.params is None else ", ".join(map(str, self.params))
        return f"{self.name}({params})"

    def describe(self) -> str:
        """The prototype and the resources, for repr and docstrings."""
        facts: list[str] = [self.arch]
        if self.num_regs is not None:
            facts.append(f"{self.num_regs} registers")
        if self.static_shared_bytes is not None:
            facts.append(f"{self.static_shared_bytes} bytes static shared memory")
        if self.local_bytes:
            facts.append(f"{self.local_bytes} bytes local memory")
        if self.required_block is not None:
            facts.append(f"blockDim exactly {self.required_block}")
        elif self.max_threads is not None:
            facts.append(f"at most {self.max_threads} threads")
        if self.cluster is not None:
            facts.append(f"cluster {self.cluster}")
        text = f"{self.prototype()} [{', '.join(facts)}]"
        if self.launch is not None:
            text += f"\n  gridDim {self.launch.grid}"
            if said := self.launch.describe():
                text += f"\n  {said}"
        return text


class Chosen(NamedTuple):
    """The image that runs on a device: its bytes, and what is known of its functions."""

    key: str
    kind: str
    label: str
    read: Callable[[], bytes]
    functions: Mapping[str, FunctionSpec]
    minimum_driver: int
    vouched: bool
    # The target that the driver is to compile it for, '' where it is machine code.
    jit_target: str = ""
    # Puts the caller's types onto what only the driver could tell.
    declare: Callable[[FunctionSpec], FunctionSpec] = lambda spec: spec
    # What the reader of a cubin does not know: only a driver can tell whether it is sound.
    unknown: tuple[str, ...] = ()


class Image(Protocol):
    """What Kernel needs of an image."""

    label: str

    def names(self) -> Sequence[str] | None:
        """Function names; None where only the driver can tell (a compressed fatbin)."""

    def spec(self, name: str) -> FunctionSpec:
        """One function, before any device is known."""

    def choose(self, compute_capability: tuple[int, int]) -> Chosen:
        """What to load on a GPU, or CubinNotFoundError."""


def spec_of(
    function: FunctionEntry | FunctionInfo, arch: str, params: Iterable[Param]
) -> FunctionSpec:
    """The spec of a manifest's or a cubin's function with `params`."""
    return FunctionSpec(
        function.name,
        arch,
        tuple(params),
        function.num_regs,
        function.static_shared_bytes,
        function.local_bytes,
        function.max_threads,
        function.required_block,
        function.cluster,
        launch=getattr(function, "launch", None),
    )


class _Doc:
    """`__doc__` of a class, and of its functions with what each takes: written when asked for."""

    def __init__(self, text: str | None) -> None:
        self._text = text

    def __get__(self, function: Any, owner: Any = None) -> str | None:
        return self._text if function is None else f"{function.spec.describe()}\n\n{self._text}"


class Documented:
    """A base of classes of functions, which have a `spec`: gives each class such a `__doc__`."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        cls.__doc__ = _Doc(cls.__doc__)  # type: ignore[assignment]
