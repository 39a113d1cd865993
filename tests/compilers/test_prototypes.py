"""Reading kernel prototypes from preprocessed text, and checking them against PTX and cubin."""

from __future__ import annotations

import pytest

from kernel_hub.collection.manifest import ParamEntry
from kernel_hub.compilers.declarations import Declared, match_params, read_prototypes
from kernel_hub.cubin import ParamInfo, PtxParam
from kernel_hub.errors import KernelHubError
from kernel_hub.signature.c_types import canonical, type_info

GLOBAL = "__attribute__((global))"
BOUNDS = "__attribute__((launch_bounds(256, (2 * 1))))"
GRID_CONSTANT = "__attribute__((grid_constant))"


def params_of(text: str, name: str = "k") -> Declared:
    return read_prototypes(text, [name], "csrc/x.cu")[name]


@pytest.mark.parametrize(
    "head",
    [
        f'extern "C" {GLOBAL} void',
        f'extern "C" {GLOBAL} {BOUNDS} void',
        f'extern "C" {GLOBAL} void {BOUNDS}',
        f'extern "C" void {GLOBAL} {BOUNDS}',
        f'extern "C" {{ {GLOBAL} __attribute__((cluster_dims(2, 1, 1))) void',
        f'{GLOBAL} extern "C" void',
        f'extern "C" {GLOBAL}\n# 12 "csrc/x.cu"\nvoid',
    ],
)
def test_where_the_name_stands(head: str) -> None:
    assert params_of(f"{head} k(float* out, int n) {{ g(1, 2); }}") == [
        ("out", "float*"),
        ("n", "int"),
    ]


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ("", []),
        ("void", []),
        ("const float* __restrict__ x", [("x", "float*")]),
        ("float const *const x", [("x", "float*")]),
        ("struct Box box, Box const* boxes", [("box", "Box"), ("boxes", "Box*")]),
        ("unsigned n, unsigned long long int m", [("n", "uint32_t"), ("m", "uint64_t")]),
        ("int, float*, unsigned int", [("arg0", "int"), ("arg1", "float*"), ("arg2", "uint32_t")]),
        (f"const {GRID_CONSTANT} CUtensorMap map", [("map", "CUtensorMap")]),
        ("const __grid_constant__ CUtensorMap map", [("map", "CUtensorMap")]),
        ("int sizes[4], void** table", [("sizes", "int*"), ("table", "void**")]),
        (
            "__half h, half g, nv_bfloat16 b",
            [("h", "__half"), ("g", "__half"), ("b", "__nv_bfloat16")],
        ),
        ("float*\n    x", [("x", "float*")]),
    ],
)
def test_parameters(declared: str, expected: Declared) -> None:
    assert params_of(f'extern "C" {GLOBAL} void k({declared});') == expected


def test_aliases_are_followed() -> None:
    text = f"""
        using bf16 = __nv_bfloat16;
        namespace n {{ typedef bf16 element; using pointer = const element*; }}
        typedef __attribute__((device_builtin)) struct uint4 uint4;
        struct Box {{ int x; }}; typedef struct Box_st {{ int y; }} Opaque;
        using circle = circle2; using circle2 = circle;
        extern "C" {GLOBAL} void k(
            bf16* a, n::pointer b, n::element c, uint4* d, Opaque e, circle* f);
    """
    types = [c_type for _, c_type in params_of(text)]
    assert types[:5] == ["__nv_bfloat16*", "__nv_bfloat16*", "__nv_bfloat16", "uint4*", "Opaque"]
    assert types[5].startswith("circle")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{GLOBAL} void other(int n);", 'no extern "C" __global__ prototype found for k'),
        (f"{GLOBAL} void k(Vec<float, 4> v);", "k: parameter 0 `Vec<float, 4> v` has a '<'"),
        (f"{GLOBAL} void k(int a, void (*f)(int));", "k: parameter 1"),
        (f"{GLOBAL} void k(int& a);", "has a '&'"),
        (f"using A = int; using A = float; {GLOBAL} void k(A a);", "alias of float and of int"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, said: str) -> None:
    with pytest.raises(KernelHubError, match=r"csrc/x\.cu") as caught:
        params_of(text)
    assert said in str(caught.value)


DECLARED: Declared = [("x", "float*"), ("n", "int"), ("eps", "float"), ("box", "Box")]
IN_CUBIN = [ParamInfo(0, 0, 8), ParamInfo(1, 8, 4), ParamInfo(2, 12, 4), ParamInfo(3, 16, 12)]
IN_PTX = [
    PtxParam("k_param_0", ".u64", 8, 8),
    PtxParam("k_param_1", ".u32", 4, 4),
    PtxParam("k_param_2", ".f32", 4, 4),
    PtxParam("k_param_3", ".b8", 12, 4),
]


def test_source_ptx_and_cubin_agree() -> None:
    entries = match_params(DECLARED, IN_CUBIN, IN_PTX, "csrc/x.cu: k")
    assert entries[2] == ParamEntry("eps", "float", 4, 12)
    assert [e.offset_bytes for e in entries] == [0, 8, 12, 16]


@pytest.mark.parametrize(
    ("declared", "in_cubin", "in_ptx", "said"),
    [
        (
            DECLARED[:3],
            IN_CUBIN,
            IN_PTX,
            "3 parameters in the source, 4 in the PTX, 4 in the cubin",
        ),
        (DECLARED, IN_CUBIN[:3], IN_PTX, "3 in the cubin"),
        ([*DECLARED[:1], ("n", "int64_t"), *DECLARED[2:]], IN_CUBIN, IN_PTX, "int64_t n.* 8 bytes"),
        ([*DECLARED[:1], ("n", "float"), *DECLARED[2:]], IN_CUBIN, IN_PTX, r"float n.*\.u32"),
        ([*DECLARED[:2], ("eps", "int"), DECLARED[3]], IN_CUBIN, IN_PTX, r"int eps.*\.f32"),
        (
            DECLARED,
            [*IN_CUBIN[:3], ParamInfo(3, 16, 8)],
            IN_PTX,
            "Box box.*12 bytes .* 8 bytes at 16",
        ),
        (DECLARED, [*IN_CUBIN[:3], ParamInfo(3, 24, 12)], IN_PTX, "at 24 in the cubin"),
        (DECLARED, [*IN_CUBIN[:3], ParamInfo(3, 12, 12)], IN_PTX, "at 12 in the cubin"),
    ],
)
def test_a_disagreement_names_function_and_parameter(
    declared: Declared, in_cubin: list[ParamInfo], in_ptx: list[PtxParam], said: str
) -> None:
    with pytest.raises(KernelHubError, match=rf"^csrc/x\.cu: k.*{said}"):
        match_params(declared, in_cubin, in_ptx, "csrc/x.cu: k")


@pytest.mark.parametrize(
    ("text", "name", "size_bytes", "kind", "dtype"),
    [
        ("const unsigned char", "uint8_t", 1, "uint", "uint8"),
        ("signed  char", "int8_t", 1, "int", "int8"),
        ("char", "char", 1, "int", "int8"),
        ("bool", "bool", 1, "bool", "bool"),
        ("short int", "int16_t", 2, "int", "int16"),
        ("int32_t", "int", 4, "int", "int32"),
        ("long", "int64_t", 8, "int", "int64"),
        ("std::size_t", "uint64_t", 8, "uint", "uint64"),
        ("long unsigned int", "uint64_t", 8, "uint", "uint64"),
        ("double", "double", 8, "float", "fp64"),
        ("__nv_fp8_e4m3 *", "__nv_fp8_e4m3*", 8, "pointer", "e4m3"),
        ("const half *__restrict__", "__half*", 8, "pointer", "fp16"),
        ("void *", "void*", 8, "pointer", None),
        ("float **", "float**", 8, "pointer", None),
        ("struct Box *", "Box*", 8, "pointer", None),
        ("CUtensorMap", "CUtensorMap", 128, "struct", None),
    ],
)
def test_type_table(text: str, name: str, size_bytes: int, kind: str, dtype: str | None) -> None:
    assert canonical(text) == canonical(name) == name
    info = type_info(text)
    assert info is not None
    assert (info.size_bytes, info.kind, info.dtype) == (size_bytes, kind, dtype)


def test_a_type_outside_the_table_is_unknown() -> None:
    assert type_info("Box") is None
