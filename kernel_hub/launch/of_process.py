"""What a process has loaded is of this process: its copies are itself, and none goes elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


class OfThisProcess:
    """A base of handles. A model that has one may be copied, as one that has a function may."""

    __slots__ = ()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        kind = type(self).__name__
        raise TypeError(f"a {kind} cannot be pickled: make the Kernel in each process")
