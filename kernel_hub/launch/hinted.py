"""A function whose launches name a better way, for images that `Kernel` takes but others know."""

from __future__ import annotations

from typing import Any

from ..errors import KernelHubError
from ..image.shipped import FunctionSpec
from .function import KernelFunction
from .loader import Loader


class HintedFunction(KernelFunction):
    """A function that has a better way to be launched, which the errors of a launch name."""

    _hint: str

    @classmethod
    def _hinted(cls, hint: str, loader: Loader, spec: FunctionSpec) -> HintedFunction:
        self = cls._make(loader, spec)
        assert isinstance(self, HintedFunction)
        self._hint = hint
        return self

    def __call__(self, *args: Any, **options: Any) -> Any:
        try:
            return super().__call__(*args, **options)
        except (KernelHubError, TypeError) as error:
            if error.args and self._hint not in str(error.args[0]):
                error.args = (f"{error.args[0]}\n{self._hint}", *error.args[1:])
            raise
