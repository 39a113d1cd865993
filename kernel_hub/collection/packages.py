"""Where an installed package's files are, found without running its code."""

from __future__ import annotations

import importlib.util

from ..errors import CubinNotFoundError


def locations_of(package: str) -> list[str]:
    """The folders of `package`; none for a module that is no package. Only its parents' code runs.

    Raises CubinNotFoundError where there is none of that name.
    """
    if not all(part.isidentifier() for part in package.split(".")):
        raise CubinNotFoundError(
            f"{package!r} is neither the name of a package nor a folder with a manifest.json"
        )
    locations: list[str] | None = None
    for name in dict.fromkeys((package.partition(".")[0], package)):
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError) as error:
            raise CubinNotFoundError(f"no package {package!r} can be imported: {error}") from error
        if spec is None:
            raise CubinNotFoundError(f"no package {package!r} is installed: {name} is not found")
        locations = spec.submodule_search_locations
        if locations is None:
            return []
    return list(locations or ())
