"""Tuple arguments: one name to the caller, one parameter of the kernel for each element in it.

Knows names and values only. An element is called `pair.0`, one of an inner tuple `pair.1.0`;
elements that are constants are compiled in and not passed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import ParamsError


class Tuples:
    """What a call may pass for arguments called `names`, tuples among them, as one flat list."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)
        self.any = any("." in name for name in names)

    def flat(self, params: Sequence[Any]) -> Sequence[Any]:
        """`params` with a value for each name: as they are where no tuple is among them.

        Raises ParamsError where a tuple has another number of elements.
        """
        if not any(isinstance(value, (tuple, list)) for value in params):
            return params
        found: list[Any] = []
        for value in params:
            top = self._names[len(found)].partition(".")[0] if len(found) < len(self._names) else ""
            found += self._leaves(top, value)
        return found

    def by_name(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """A dict with tuples under their own names, as one of their elements' names."""
        found: dict[str, Any] = {}
        for top, value in params.items():
            elements = [name for name in self._names if name.startswith(f"{top}.")]
            if elements and isinstance(value, (tuple, list)):
                found |= zip(elements, self._leaves(top, value), strict=True)
            else:
                found[top] = value
        return found

    def _leaves(self, top: str, value: Any) -> list[Any]:
        if not isinstance(value, (tuple, list)):
            return [value]
        leaves = list(_walk(value))
        elements = [name for name in self._names if name.partition(".")[0] == top]
        if elements == [top] or len(leaves) != len(elements):
            takes = f"a tuple of {len(elements)} ({', '.join(elements)}; constants are left out)"
            raise ParamsError(
                f"{top or 'one argument too many'} is a tuple of {len(leaves)} values; it takes "
                + (takes if top and elements != [top] else "no tuple")
            )
        return leaves


def _walk(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _walk(item)
    else:
        yield value
