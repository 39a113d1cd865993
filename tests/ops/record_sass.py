"""Write tests/ops/sass_loops.json from the cubins that are there, and say what changed.

    python tests/ops/record_sass.py

Needs nvdisasm (pip install nvidia-cuda-nvdisasm). Read what it prints before committing: a loop
that grew is a reason for a look at the source.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

import sass  # noqa: E402


def main() -> int:
    if sass.find_nvdisasm() is None:
        print("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm", file=sys.stderr)
        return 1
    before = sass.recorded() if sass.RECORD.exists() else {}
    text = sass.to_json(sass.hopper_cubins())
    sass.RECORD.write_text(text, encoding="utf-8")
    after = sass.recorded()
    for cubin in sorted({*before, *after}):
        old, new = before.get(cubin, {}), after.get(cubin, {})
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                print(f"{name}: {old.get(name, 'not there')} -> {new.get(name, 'gone')}")
    print(f"wrote {sass.RECORD}: {sum(map(len, after.values()))} functions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
