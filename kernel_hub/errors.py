"""Every exception kernel_hub raises. Knows nothing of the other layers.

Each message says what was asked, what was found and what to do; the parts are also attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class KernelHubError(Exception):
    """Base of every error kernel_hub raises on purpose."""


class DriverNotFoundError(KernelHubError, ImportError, RuntimeError):
    """libcuda could not be loaded, is a stub, or is too old to have what is needed."""

    def __init__(self, message: str, *, tried: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.tried = tuple(tried)


class CudaDriverError(KernelHubError, RuntimeError):
    """A driver call failed. `.call`, `.code` (CUresult) and `.name` say which and how."""

    def __init__(self, message: str, *, call: str, code: int, name: str) -> None:
        super().__init__(message)
        self.call = call
        self.code = code
        self.name = name


class DeviceOutOfMemoryError(CudaDriverError, MemoryError):
    """Device memory ran out: the message has the asked, free and pool figures. Or host memory that
    can be page-locked (`empty_pinned`)."""


class CubinNotFoundError(KernelHubError, FileNotFoundError, RuntimeError):
    """No cubin fits. `.rejected` maps each candidate to the reason it fell."""

    def __init__(self, message: str, *, rejected: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.rejected = dict(rejected or {})

    def __str__(self) -> str:  # OSError would print errno parts
        return str(self.args[0])


class CubinCorruptError(KernelHubError, ValueError):
    """An image is not what it claims to be. `.offset` is the byte where it shows, if known."""

    def __init__(self, message: str, *, offset: int | None = None) -> None:
        super().__init__(message if offset is None else f"{message} (at byte {offset:#x})")
        self.offset = offset


class ProbeError(KernelHubError, RuntimeError):
    """An image that is to be loaded in a child process first, and no child could be asked."""


class FunctionNotFoundError(KernelHubError, AttributeError):
    """The image has no function of that name; the message lists those it has, nearest first."""

    @classmethod
    def among(cls, name: str, names: Iterable[str], where: str) -> FunctionNotFoundError:
        """The error for `name` asked of `where`, which holds `names`."""
        return cls(f"no function {name!r} in {where}; it has: {listed(nearest(name, names))}")


class ParamsError(KernelHubError, TypeError):
    """A launch parameter does not fit what the kernel takes."""


class LaunchConfigError(KernelHubError, ValueError):
    """gridDim, blockDim, shared memory, cluster or stream is outside a limit, which is named."""


class TensorError(KernelHubError, ValueError):
    """An op's tensor has the wrong shape, dtype, stride or device."""


class CompileError(KernelHubError, RuntimeError):
    """A source does not compile. `.log` is what the compiler said."""

    def __init__(self, message: str, *, log: str = "") -> None:
        super().__init__(f"{message}\n{log}" if log else message)
        self.log = log


class MissingPackageError(KernelHubError, ImportError):
    """An optional package is not installed; the message names what to install."""


class TableError(KernelHubError, ValueError):
    """A table of measured choices does not say what it should, or cannot be written."""


class ModelError(KernelHubError, ValueError):
    """A model's folder, configuration or weights are not what the engine can run, or not whole."""


class RankError(KernelHubError, RuntimeError):
    """One of the processes that run a model together failed, and with it all of them."""


class RequestError(KernelHubError, ValueError):
    """An engine was asked for what it cannot do; `.argument` names what does not fit."""

    def __init__(self, message: str, *, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


class PromptTooLongError(RequestError):
    """A prompt leaves no room for a token in the context or in the cache."""


def listed(names: Iterable[object], most: int = 12, between: str = ", ") -> str:
    """`names` in a line: 'a, b, c', and beyond `most` of them 'a, b, … and 14 more'."""
    every = [str(name) for name in names]
    shown = every if len(every) <= most else [*every[:most], f"… and {len(every) - most} more"]
    return between.join(shown) or "none"


def nearest(name: object, names: Iterable[str]) -> list[str]:
    """`names` ordered by likeness to `name`."""
    import difflib  # a millisecond, for errors alone

    wanted = str(name)

    def likeness(other: str) -> tuple[float, str]:
        return (-difflib.SequenceMatcher(None, wanted, other).ratio(), other)

    return sorted(names, key=likeness)
