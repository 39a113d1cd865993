"""Tuple arguments of Triton's kernels on the stand-in: given as tuples, or element by element."""

from __future__ import annotations

import ctypes
import random
import struct
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fakecuda import FakeCuda
from triton_data import DATA, words

from kernel_hub import DeviceArray
from kernel_hub.errors import ParamsError
from kernel_hub.formats import triton
from kernel_hub.formats.triton.tuples import Tuples

VERSIONS = ["3.6.0", "3.9.0"]  # the first gives every element the tuple's name


class Pair(NamedTuple):
    first: Any
    second: Any


@pytest.mark.parametrize("version", VERSIONS)
def test_every_way_to_pass_a_tuple_is_the_same(fakecuda: FakeCuda, version: str) -> None:
    f = triton.load(DATA / version, "tuple_kernel")
    x, y, out = (DeviceArray.zeros(64, "fp32") for _ in range(3))
    last = "numbers.1" if version == "3.6.0" else "numbers.1.0"
    assert [a.name for a in f.arguments] == ["pair.0", "pair.1", "numbers.0", last, "out"]
    f[1]((x, y), (60, (2.5,)), out)
    f[1]([x, y], [60, 2.5], out)
    f[1](Pair(x, y), out=out, numbers=(60, (2.5,)))
    f[1](x, y, 60, 2.5, out)
    f(1, params=[(x, y), (60, 2.5), out])
    f(1, params={"out": out, "numbers": (60, (2.5,)), "pair": Pair(x, y)})
    f(1, params={"out": out, "pair.0": x, "pair.1": y, "numbers.0": 60, last: ctypes.c_float(2.5)})
    f.bind(1, params=[(x, y), (60, (2.5,)), out])()
    wanted = (*words(x.ptr, y.ptr), struct.pack("<i", 60), struct.pack("<f", 2.5), *words(out.ptr))
    launches = [launch.params for launch in fakecuda.launches()]
    assert launches == [(*wanted, *words(0, 0))] * 8


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wrong_tuple_is_named(fakecuda: FakeCuda, version: str) -> None:
    f = triton.load(DATA / version, "tuple_kernel")
    x = DeviceArray.zeros(64, "fp32")
    for given, words_ in (
        (((x,), (60, 2.5), x), r"pair is a tuple of 1 values; it takes a tuple of 2 \(pair.0, "),
        (((x, x), (60, (2.5, 3)), x), "numbers is a tuple of 3 values; .* constants are left out"),
        (((x, x), (60, 2.5), (x,)), "out is a tuple of 1 values; it takes no tuple"),
        (((x, x), (60, 2.5), x, (1, 2)), "one argument too many"),
        (((x, x), (60, 2.5)), "too few params"),
        (((x, x), 60, x), "too few params"),
    ):
        with pytest.raises(ParamsError, match=words_):
            f[1](*given)
        with pytest.raises(ParamsError):
            f(1, params=list(given))
        with pytest.raises(ParamsError):
            f.bind(1, params=list(given))
    with pytest.raises(ParamsError, match="pair is a tuple of 3"):
        f(1, params={"out": x, "numbers": (1, 2.0), "pair": (x, x, x)})
    wrong = DeviceArray.zeros(64, "fp32")[1:]
    with pytest.raises(ParamsError, match=r"params\[0\] \(pair.0\) is the address"):
        f[1]((wrong, x), (60, 2.5), x)
    assert fakecuda.launch_count == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_nesting_comes_out_flat(seed: int) -> None:
    rng = random.Random(seed)
    values = iter(range(1000))

    def grow(name: str, depth: int) -> tuple[Any, list[str]]:
        if depth == 3 or (depth and rng.random() < 0.5):
            return next(values), [name]
        items = [grow(f"{name}.{i}", depth + 1) for i in range(rng.randint(1, 3))]
        return tuple(item for item, _ in items), [leaf for _, each in items for leaf in each]

    made = [grow(f"a{i}", 0) if rng.random() < 0.6 else (next(values), [f"a{i}"]) for i in range(5)]
    names = [leaf for _, leaves in made for leaf in leaves]
    tuples = Tuples(names)
    flat = list(tuples.flat([value for value, _ in made]))
    assert flat == sorted(flat) and len(flat) == len(names)
    named = {leaves[0].partition(".")[0]: value for value, leaves in made}
    assert tuples.by_name(named) == dict(zip(names, flat, strict=True))


def test_built_ahead_of_time(fakecuda: FakeCuda, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels are compiled by Triton")
    from triton_kernels import tuple_kernel

    constants = {"BLOCK": 64}
    by_name = {"pair": ("*fp32:16", "*fp32"), "numbers": ("i32", ("fp32", None)),
               "out_ptr": "*fp32:16", "stride": "i32:1"}  # fmt: skip
    by_position = "(*fp32:16, *fp32), (i32, (fp32, 3)), *fp32:16, i32:1, 64"
    x, y, out = (DeviceArray.zeros(64, "fp32") for _ in range(3))
    names = []
    for signature in (by_name, by_position):
        given = constants if signature is by_name else None
        name = triton.compile(tuple_kernel, signature, constexprs=given, arch="sm90", out=tmp_path)
        f = triton.collection(tmp_path)[name]
        f[1]((x, y), (60, (2.5,)), out)
        assert fakecuda.launch().params[:2] == words(x.ptr, y.ptr)  # type: ignore[index]
        assert f.arguments[0].divisors == (16,) != f.arguments[1].divisors
        assert f.constexprs["stride"] == 1
        names.append(name)
    assert names[0] != names[1]
    for wrong, words_ in (
        ("(*fp32,constexpr), i32, *fp32, i32", "in a tuple a constant is given by its value"),
        ("(*fp32, i32, *fp32, i32", "has 1 entries"),
        ("(), i32, *fp32, i32", "an empty tuple"),
        ("(*fp32, odd), i32, *fp32, i32", "is 'odd': expected a type"),
    ):
        with pytest.raises(ParamsError, match=words_):
            triton.compile(tuple_kernel, wrong, constexprs=constants, arch="sm90", out=tmp_path)
