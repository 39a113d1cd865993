"""Measured choices of variants, as data. Knows no op, no tensor and no driver."""

from .table import (
    VARIABLE,
    Choice,
    Gpu,
    GpuSection,
    Layout,
    Row,
    Table,
    is_enabled,
    tables,
    user_folder,
    write,
)

__all__ = [
    "VARIABLE",
    "Choice",
    "Gpu",
    "GpuSection",
    "Layout",
    "Row",
    "Table",
    "is_enabled",
    "tables",
    "user_folder",
    "write",
]
