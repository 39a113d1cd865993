"""What cpm_kernels and its clients ask of pkg_resources, which setuptools no longer has.

Files beside modules; and versions, as programs ask for these that would do without the whole.
"""

from __future__ import annotations

import io
import os
from importlib import import_module, metadata
from typing import Any

__all__ = [
    "DistributionNotFound",
    "get_distribution",
    "resource_exists",
    "resource_filename",
    "resource_stream",
    "resource_string",
]


DistributionNotFound = metadata.PackageNotFoundError


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"kernel_hub's pkg_resources has no {name}; setuptools' own is not installed "
        "(pip install 'setuptools<82')"
    )


def get_distribution(dist: str) -> metadata.Distribution:
    """An installed distribution; raises DistributionNotFound."""
    return metadata.distribution(dist)


def resource_filename(package_or_requirement: Any, resource_name: str) -> str:
    """The path of a file beside a module, which is given by name or itself."""
    module = package_or_requirement
    if isinstance(module, str):
        module = import_module(module)
    return os.path.join(os.path.dirname(module.__file__), *resource_name.split("/"))


def resource_string(package_or_requirement: Any, resource_name: str) -> bytes:
    """The bytes of a file beside a module, in an archive too."""
    module = package_or_requirement
    if isinstance(module, str):
        module = import_module(module)
    data: bytes = module.__spec__.loader.get_data(resource_filename(module, resource_name))
    return data


def resource_exists(package_or_requirement: Any, resource_name: str) -> bool:
    """Whether there is such a file."""
    try:
        resource_string(package_or_requirement, resource_name)
    except OSError:
        return False
    return True


def resource_stream(package_or_requirement: Any, resource_name: str) -> io.BytesIO:
    """The file, to be read."""
    return io.BytesIO(resource_string(package_or_requirement, resource_name))
