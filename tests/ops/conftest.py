"""The `way` fixture; and where torch is missing, none of these tests: the ops are torch ops."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["*test_*.py"]  # of folders too
else:
    from ways import way as way
