"""Writes wgmma.cuh, the warpgroup products by shape.

python3 make_wgmma.py | clang-format --assume-filename=wgmma.cuh > wgmma.cuh
"""

SCORES_N = (80, 112, 128)  # the block_n of flash_attention_sm90.cu
OUTPUT_N = (64, 96, 128, 192, 256)  # its head_dims
DTYPES = (("bf16", "__nv_bfloat16"), ("f16", "__half"))
PER_LINE = 12
PER_GROUP = 8  # operands of a macro

HEADER = """\
// Warpgroup products D += A B of 64 x N by 16, fp32 accumulators; written by make_wgmma.py.
//   Wgmma<T>::ss(d, a, b, accumulate)   A and B in shared memory, both K-major
//   Wgmma<T>::rs(d, a, b, accumulate)   A in registers (mma_m16n8k16's fragment), B MN-major
// `a`, `b` are descriptors (sm90.cuh). Where `accumulate` is 0, D is overwritten. Thread t of the
// warpgroup holds rows 16 (t / 32) + lane / 4 and + 8: d[4j], d[4j + 1] are columns
// 8j + 2 (lane % 4) and the next one of the first row, d[4j + 2], d[4j + 3] of the second.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace kernel_hub {

template <typename T>
struct Wgmma;
"""
OPERANDS = "KERNEL_HUB_ACCUMULATORS"


def operands_macro() -> str:
    """PER_GROUP accumulators as read and written operands."""
    items = ", ".join(f'"+f"(d[(i) + {i}])' for i in range(PER_GROUP))
    return f"#define {OPERANDS}(i) {items}\n"


def product(n: int, ptx_type: str, from_registers: bool) -> str:
    """One static function of Wgmma<T>."""
    count = n // 2
    indent = " " * 12
    a_regs = 4 if from_registers else 1
    a_names = [f"%{count + i}" for i in range(a_regs)]
    b, flag = f"%{count + a_regs}", f"%{count + a_regs + 1}"
    a_text = "{" + ", ".join(a_names) + "}" if from_registers else a_names[0]
    modifiers = "p, 1, 1, 1" if from_registers else "p, 1, 1, 0, 0"
    registers = [
        ", ".join(f"%{i}" for i in range(start, min(start + PER_LINE, count)))
        for start in range(0, count, PER_LINE)
    ]
    body = ', "\n'.join(f'{indent}"{line}' for line in registers)
    a_type = "const uint32_t (&a)[4]" if from_registers else "uint64_t a"
    a_operands = ", ".join(f'"r"(a[{i}])' for i in range(4)) if from_registers else '"l"(a)'
    name = "rs" if from_registers else "ss"
    operands = ", ".join(f"{OPERANDS}({i})" for i in range(0, count, PER_GROUP))
    return f"""\
    static __device__ __forceinline__ void {name}(float (&d)[{count}], {a_type}, uint64_t b,
                                              int accumulate) {{
        asm volatile(
            "{{\\n.reg .pred p;\\nsetp.ne.b32 p, {flag}, 0;\\n"
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{ptx_type}.{ptx_type} {{"
{body}}}, {a_text}, {b}, {modifiers};\\n}}"
            : {operands}
            : {a_operands}, "l"(b), "r"(accumulate));
    }}
"""


def main() -> None:
    parts = [HEADER, operands_macro()]
    for ptx_type, cpp_type in DTYPES:
        parts.append(f"template <>\nstruct Wgmma<{cpp_type}> {{")
        parts += [product(n, ptx_type, False) for n in SCORES_N]
        parts += [product(n, ptx_type, True) for n in OUTPUT_N]
        parts.append("};\n")
    parts.append(f"#undef {OPERANDS}\n\n}}  // namespace kernel_hub")
    print("\n".join(parts))


if __name__ == "__main__":
    main()
