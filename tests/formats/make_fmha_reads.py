"""Writes data/fmha_reads.txt: what genuine kernels read of their struct, of each kind of name one.

    python make_fmha_reads.py Params512=trtllm-0.16 Params=trtllm-2025-09 …

Folders of TensorRT-LLM's `.cubin` files, which are not shipped; those of other structs of the same
size go into folders of their own. A line: the struct, the kernel, then byte:bytes of each read.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

from kernel_hub.formats import fmha_v2
from kernel_hub.formats.fmha_v2 import KernelName, param_struct
from kernel_hub.formats.fmha_v2.reads import struct_reads

TARGET = Path(__file__).parent / "data/fmha_reads.txt"


def kind(name: KernelName) -> tuple[object, ...]:
    """What decides which fields a kernel reads, and how."""
    attributes = sorted(one.split("_")[0] for one in name.attributes)
    generation = name.arch[:-1]
    sizes = name.head_dim != name.head_dim_v
    return (
        generation,
        name.dtype == "e4m3",
        name.layout,
        sizes,
        name.mask,
        *attributes,
        name.variant,
    )


def main() -> None:
    """Write the table."""
    lines = {}
    for argument in sys.argv[1:]:
        struct, _, folder = argument.partition("=")
        size = ctypes.sizeof(getattr(param_struct, struct))
        for path in sorted(Path(folder).glob("*.cubin")):
            for name, function in fmha_v2.load(path).items():
                if [param.size_bytes for param in function.params or ()] != [size]:
                    continue
                reads = sorted(struct_reads(path.read_bytes(), function.name, size))
                text = " ".join(f"{read.offset}:{read.size}" for read in reads)
                lines.setdefault((struct, *kind(name)), f"{struct} {name} {text}\n")
    TARGET.write_text("".join(sorted(lines.values())), encoding="utf-8")


if __name__ == "__main__":
    main()
