"""Draws CUDA C++ programs by lot: what compilers can put into a cubin, and what must be read of it.

Knows no compiler. The same seed and number give the same program.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

ARCHS = ("75", "80", "86", "89", "90", "90a")
HEADERS = {
    "half": "#include <cuda_fp16.h>",
    "bf16": "#include <cuda_bf16.h>",
    "fp8": "#include <cuda_fp8.h>",
    "groups": "#include <cooperative_groups.h>",
    "barrier": "#include <cuda/barrier>",
    "std": "#include <cuda/std/array>\n#include <cuda/std/atomic>",
}
# A parameter's type and its size, which is its alignment as well unless a third number says less.
PARAMS = [
    ("int", 4, 4), ("unsigned", 4, 4), ("float", 4, 4), ("double", 8, 8), ("char", 1, 1),
    ("short", 2, 2), ("long long", 8, 8), ("const float*", 8, 8), ("float4", 16, 16),
    ("Odd3", 3, 1), ("Packed", 12, 4), ("Aligned", 64, 64), ("Wide", 520, 8), ("bool", 1, 1),
]  # fmt: skip
STRUCTS = """struct Odd3 { char bytes[3]; };
struct Packed { int a; short b; char c; float d; };
struct alignas(64) Aligned { int words[4]; };
struct Wide { double values[65]; };
"""


@dataclass
class Kernel:
    """What is known of a kernel before it is compiled."""

    name: str
    params: list[tuple[int, int]]
    max_threads: int | None = None
    cluster: tuple[int, int, int] | None = None
    least_shared: int = 0


@dataclass
class Program:
    """A translation unit, and a second one where it is to be linked."""

    source: str
    other: str
    arch: str
    flags: list[str]
    headers: set[str]
    kernels: list[Kernel]
    variables: dict[str, int]
    features: list[str]


@dataclass
class _Draft:
    rng: random.Random
    arch: int
    headers: set[str] = field(default_factory=set)
    outside: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    variables: dict[str, int] = field(default_factory=dict)
    shared: int = 0
    number: int = 0

    def name(self, stem: str) -> str:
        """A name of its own."""
        self.number += 1
        return f"{stem}{self.number}"

    def pick(self, *choices: object) -> str:
        """One of them, as text."""
        return str(self.rng.choice(choices))


def _static_shared(draft: _Draft) -> str:
    name, align = draft.name("tile"), draft.pick(1, 4, 8, 16, 128, 256, 1024)
    kind, size = draft.rng.choice([("char", 1), ("float", 4), ("double", 8)])
    count = draft.rng.choice([1, 3, 17, 32, 129, 1000])
    draft.shared += size * count
    return (
        f"__shared__ __align__({max(int(align), size)}) {kind} {name}[{count}]; "
        f"{name}[t % {count}] = ({kind})out[t]; __syncthreads(); "
        f"out[t] += {name}[(t + 1) % {count}];"
    )


def _dynamic_shared(draft: _Draft) -> str:
    name, align = draft.name("dynamic"), draft.pick(4, 16, 128, 1024)
    return (
        f"extern __shared__ __align__({align}) float {name}[]; {name}[t] = out[t]; "
        f"__syncthreads(); out[t] = {name}[t ^ 1];"
    )


def _variable(draft: _Draft) -> str:
    name = draft.name("variable")
    count, value = draft.rng.choice([1, 2, 5, 33, 1025]), draft.rng.random() < 0.5
    align = f"__align__({draft.pick(4, 16, 128, 256)}) "
    kind, size = draft.rng.choice([("float", 4), ("double", 8), ("unsigned char", 1)])
    place = draft.pick("__device__", "__device__", "__constant__")
    start = " = {1, 2}" if value and count > 1 else " = {3}" if value else ""
    draft.outside.append(f"{place} {align}{kind} {name}[{count}]{start};")
    draft.variables[name] = size * count
    write = f"{name}[t % {count}] = ({kind})out[t];" if place == "__device__" else ""
    return f"{write} out[t] += {name}[(t + 3) % {count}];"


def _pointer_table(draft: _Draft) -> str:
    name, pointed = draft.name("table"), draft.name("pointed")
    draft.outside.append(
        f"__device__ float {pointed}[8]; __device__ float* {name} = {pointed} + 2;"
    )
    draft.variables |= {name: 8, pointed: 32}
    return f"out[t] += *{name}; {name} = out;"


def _texture(draft: _Draft) -> str:
    if draft.rng.random() < 0.3:
        return "surf1Dwrite(out[t], (cudaSurfaceObject_t)handle, (int)(4 * t));"
    fetch = draft.pick(
        "tex1Dfetch<float>(T, (int)t)", "tex2D<float>(T, t * 0.5f, 0.25f)",
        "tex3D<float>(T, 1, t, 2)", "tex2DLayered<float4>(T, 0.5f, t, 3).x",
        "texCubemap<float>(T, t, 1, 2)",
    )  # fmt: skip
    return f"out[t] += {fetch.replace('T', '(cudaTextureObject_t)handle')};"


def _atomic(draft: _Draft) -> str:
    kinds = ["int", "unsigned", "unsigned long long", "float", "half", "bf16", "short", "double"]
    kinds += ["half2", "shared"] + ["float4", "wide"] * (draft.arch >= 90)
    kind = draft.pick(*kinds)
    if kind in ("half", "bf16", "half2"):
        draft.headers.add(kind.removesuffix("2"))
        real = {"half": "__half", "bf16": "__nv_bfloat16", "half2": "__half2"}[kind]
        made = "__float2half2_rn" if kind == "half2" else f"({real})"
        return f"atomicAdd(({real}*)out + t, {made}(1.5f));"
    if kind == "short":
        return "atomicCAS((unsigned short*)out + t, (unsigned short)t, (unsigned short)7);"
    if kind == "shared":
        name = draft.name("sum")
        draft.shared += 4
        return f"__shared__ int {name}; atomicAdd(&{name}, t); __syncthreads(); out[t] = {name};"
    if kind == "float4":
        return "atomicAdd((float4*)out + t, make_float4(1, 2, 3, 4));"
    if kind == "wide":
        return (
            "struct alignas(16) Two { long long a, b; }; Two two{1, t}; "
            "*(Two*)out = atomicExch((Two*)out + 1, two);"
        )
    operation = draft.pick("atomicAdd", "atomicExch", "atomicMax")
    if kind in ("float", "double"):
        operation = "atomicAdd"
    scope = draft.pick("", "", "_system") if operation != "atomicMax" or kind == "int" else ""
    return f"{operation}{scope}(({kind}*)out + t, ({kind})t);"


def _barrier(draft: _Draft) -> str:
    choice = draft.pick("named", "warp", "grid", "cuda::barrier", "mbarrier", "vote", "arrive")
    if choice == "named":
        return f'asm volatile("bar.sync {draft.pick(1, 7, 15)}, 64;" ::: "memory");'
    if choice == "warp":
        return "__syncwarp(); out[t] += __shfl_xor_sync(~0u, out[t], 1);"
    if choice == "grid":
        draft.headers.add("groups")
        return "cooperative_groups::this_grid().sync();"
    if choice == "vote":
        return "out[t] += __syncthreads_count(out[t] > 0) + __syncthreads_or(t == 3);"
    if choice == "arrive":
        return 'asm volatile("bar.arrive 2, 96; bar.sync 3;" ::: "memory");'
    if choice == "mbarrier" and draft.arch >= 80:
        name = draft.name("bar")
        draft.shared += 8
        return (
            f"__shared__ unsigned long long {name}; "
            f"{{ unsigned at = (unsigned)__cvta_generic_to_shared(&{name}); "
            'asm volatile("mbarrier.init.shared.b64 [%0], 32;" :: "r"(at)); __syncthreads(); '
            '{ unsigned long long s; asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" '
            ': "=l"(s) : "r"(at)); out[t] += s; } }'
        )
    if draft.arch < 80:
        return "__syncthreads();"
    draft.headers |= {"barrier", "groups"}
    bar, tile = draft.name("barrier"), draft.name("copied")
    draft.shared += 8 + 512
    return (
        f"__shared__ cuda::barrier<cuda::thread_scope_block> {bar}; __shared__ float {tile}[128]; "
        f"if (t == 0) init(&{bar}, blockDim.x); __syncthreads(); "
        f"cuda::memcpy_async(cooperative_groups::this_thread_block(), {tile}, out, 512, {bar}); "
        f"{bar}.arrive_and_wait(); out[t] += {tile}[t % 128];"
    )


def _call(draft: _Draft) -> str:
    choice = draft.pick("noinline", "recursion", "pointer", "virtual", "local", "switch", "printf")
    if choice == "printf":
        return f'printf("{draft.pick("a %d", "%f %d", "text %p")}\\n", t, t);'
    if choice == "local":
        size = draft.pick(16, 100, 700)
        return (
            f"float many[{size}]; for (int i = 0; i < {size}; ++i) many[i] = out[i] * t; "
            f"out[t] = many[(int)out[0] % {size}];"
        )
    if choice == "switch":
        cases = " ".join(f"case {i}: out[t] = sinf(out[t] + {i}); break;" for i in range(9))
        return f"switch ((int)out[0]) {{ {cases} default: out[t] = 0; }}"
    name = draft.name("callee")
    static = draft.pick("static ", "")
    if choice == "virtual":
        draft.outside.append(
            f"struct {name} {{ virtual __device__ float go(float x) {{ return x + 1; }} }};"
            f"struct {name}b : {name} "
            "{ __device__ float go(float x) override { return x * 3; } };"
        )
        return f"{{ {name} a; {name}b b; {name}* p = t % 2 ? &a : &b; out[t] = p->go(out[t]); }}"
    body = f"{name}(x - 1) * x" if choice == "recursion" else "sinf(x) / (x + 2)"
    draft.outside.append(
        f"{static}__device__ __noinline__ float {name}(float x) {{ return x < 1 ? x : {body}; }}"
    )
    if choice == "pointer":
        table = draft.name("functions")
        draft.outside.append(f"__device__ float (*{table}[2])(float) = {{{name}, {name}}};")
        draft.variables[table] = 16
        return f"out[t] = {table}[(int)out[1] & 1](out[t]);"
    return f"out[t] = {name}(out[t]);"


def _arithmetic(draft: _Draft) -> str:
    choice = draft.pick("double", "int64", "trig", "int128", "fp8", "std", "string", "asm", "trap")
    if choice == "fp8":
        draft.headers.add("fp8")
        return "out[t] = (float)__nv_fp8_e4m3(out[t]);"
    if choice == "std":
        draft.headers.add("std")
        return (
            "{ cuda::std::array<float, 4> a{1, 2, 3, out[t]}; out[t] = a[(int)out[0] & 3]; "
            "cuda::std::atomic_ref<int> r(*(int*)out); r.fetch_add(2); }"
        )
    return {
        "double": "out[t] = (float)(sqrt((double)out[t]) / exp((double)t));",
        "int64": "out[t] = (float)((long long)out[t] / ((long long)t + 3) % 7);",
        "trig": "out[t] = sinf(out[t]) + tanf(out[t]) * powf(out[t], 1.3f);",
        "int128": "out[t] = (float)(((unsigned __int128)t * 977) >> 3);",
        "string": 'out[t] = "some text to read"[(int)out[0] & 15];',
        "asm": 'asm volatile("{ .reg .pred p; setp.gt.f32 p, %0, 0f00000000; @p trap; }" '
        ':: "f"(out[t]));',
        "trap": "if (out[t] != out[t]) __trap();",
    }[choice]


def _hopper(draft: _Draft) -> str:
    choice = draft.pick("cluster", "setmaxnreg", "fence", "wait")
    if choice == "cluster":
        return (
            '{ unsigned rank; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)); '
            "out[t] += rank; }"
        )
    return {
        "setmaxnreg": 'asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");',
        "fence": 'asm volatile("fence.proxy.async;" ::: "memory");',
        "wait": 'asm volatile("griddepcontrol.wait;" ::: "memory");',
    }[choice]


FEATURES: list[Callable[[_Draft], str]] = [
    _static_shared, _dynamic_shared, _variable, _variable, _pointer_table, _texture, _atomic,
    _atomic, _barrier, _barrier, _call, _call, _arithmetic,
]  # fmt: skip


def draw(seed: int, number: int, archs: tuple[str, ...] = ARCHS, linked: bool = True) -> Program:
    """Program `number` of `seed`; with `linked` one in five is of two files."""
    rng = random.Random(seed * 1_000_003 + number)
    arch = rng.choice(archs)
    draft = _Draft(rng, int(arch.rstrip("a")))
    bodies, kernels, used = [], [], []
    for index in range(rng.choice([1, 1, 2, 3])):
        text, kernel = _kernel(draft, arch, index, used)
        bodies.append(text)
        kernels.append(kernel)
    if linked and rng.random() < 0.2:
        _link(draft, bodies)
    flags = [["-lineinfo"], ["-G"], ["-maxrregcount=40"], ["-use_fast_math"], ["--fmad=false"]]
    chosen = rng.choice([*flags, [], [], [], [], []])
    includes = "\n".join(HEADERS[name] for name in sorted(draft.headers))
    return Program(
        "\n".join([includes, STRUCTS, *draft.outside, *bodies, ""]), "\n".join(draft.other), arch,
        list(chosen), draft.headers, kernels, draft.variables, used,
    )  # fmt: skip


def _kernel(draft: _Draft, arch: str, index: int, used: list[str]) -> tuple[str, Kernel]:
    """One kernel: out and handle, some parameters by lot, some features by lot."""
    rng = draft.rng
    extra = rng.sample(PARAMS, rng.choice([0, 1, 2, 4, 7]))
    declared, places, at = ["float* out", "unsigned long long handle"], [(0, 8), (8, 8)], 16
    # Alignment counts from the start of the constant bank.
    bank = 0x160 if draft.arch < 90 else 0x210 if draft.arch < 100 else 0x380
    for position, (kind, size, align) in enumerate(extra):
        at += -(bank + at) % align
        places.append((at, size))
        at += size
        declared.append(f"{kind} p{position}")
    draft.shared = 0
    features = [rng.choice(FEATURES) for _ in range(rng.choice([0, 1, 2, 3]))]
    if arch == "90a" and rng.random() < 0.5:
        features.append(_hopper)
    used += [feature.__name__.strip("_") for feature in features]
    body = " ".join(f"{{ {feature(draft)} }}" for feature in features)
    bounds, threads, cluster = "", None, None
    if rng.random() < 0.4:
        threads = rng.choice([32, 96, 128, 256])
        bounds = f"__launch_bounds__({threads}{rng.choice(['', ', 2'])})"
    if draft.arch >= 90 and rng.random() < 0.25:
        cluster = (rng.choice([1, 2, 4]), 1, 1)
        bounds += " __cluster_dims__({}, {}, {})".format(*cluster)
    name = f"kernel_{index}"
    head, signature = 'extern "C" ', f"{name}({', '.join(declared)})"
    tail = ""
    if rng.random() < 0.2:  # a template, explicitly instantiated
        kind = rng.choice(["float", "int"])
        head = "template <class T> "
        tail = f"\ntemplate __global__ void {name}<{kind}>({', '.join(declared)});"
        body = f"T zero = 0; out[0] += zero; {body}"
        name = ""  # mangled
    text = (
        f"{head}__global__ void {bounds} {signature} "
        f"{{ unsigned t = threadIdx.x; out[t] += 1; {body} }}{tail}"
    )
    return text, Kernel(name, places, threads, cluster, draft.shared)


def _link(draft: _Draft, bodies: list[str]) -> None:
    """Put a function, and one that is static in both files, into a second file."""
    shadow = "static __device__ __noinline__ float shadow(float x) { return x * %d + sinf(x); }"
    draft.outside += [shadow % 2, "extern __device__ float elsewhere(float);"]
    draft.other += [
        shadow % 3,
        "__device__ int counted; __device__ __noinline__ float elsewhere(float x) "
        "{ ++counted; return shadow(x); }",
    ]
    draft.variables["counted"] = 4
    bodies.append(
        'extern "C" __global__ void linked(float* out) { out[0] = elsewhere(shadow(out[1])); }'
    )
