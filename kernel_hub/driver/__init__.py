"""libcuda: opening it, prototypes, error texts, contexts. Knows nothing of images and arrays."""

from .library import LIBRARY_VARIABLE, Driver, candidates, forked_error, get
from .prototypes import (
    MAX_BLOCK_DIM,
    MAX_GRID_DIM,
    MEMORY_POOLS_SUPPORTED,
    MULTIPROCESSOR_COUNT,
    SHARED_PER_BLOCK_OPTIN,
)

__all__ = [
    "LIBRARY_VARIABLE",
    "MAX_BLOCK_DIM",
    "MAX_GRID_DIM",
    "MEMORY_POOLS_SUPPORTED",
    "MULTIPROCESSOR_COUNT",
    "SHARED_PER_BLOCK_OPTIN",
    "Driver",
    "candidates",
    "forked_error",
    "get",
]
