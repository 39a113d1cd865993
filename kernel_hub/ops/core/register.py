"""Registration of ops with torch.library, in a namespace named as the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ...collection.entries import OWN_PACKAGE
from .versions import marking

# torch.ops.kernel_hub; a build of a hub repository has a name of its own.
NAMESPACE = OWN_PACKAGE.replace(".", "_")
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    schema: str, *, cuda: Callable[..., Any], cpu: Callable[..., Any], fake: Callable[..., Any],
) -> Any:  # fmt: skip
    """Register `<namespace>::<schema>` with torch and return the op.

    It tells autograd of what it writes: torch does so for its own ops only.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(getattr(torch.ops, NAMESPACE), name).default
    written_to = [x.alias_info and x.alias_info.is_write for x in op._schema.arguments]
    places = [place for place, is_written in enumerate(written_to) if is_written]
    LIBRARY.impl(name, marking(cuda, places) if places else cuda, "CUDA")
    LIBRARY.impl(name, marking(cpu, places) if places else cpu, "CPU")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    return op


def define_given(
    schema: str, given: Callable[..., Any], *, cuda: Callable[[Any], Any],
    cpu: Callable[[Any], Any], check: Callable[[Any], Any],
    whole: Callable[[Any], Any] = lambda given: None,
) -> Any:  # fmt: skip
    """As `define`, of what takes its arguments as one, `given(*arguments)`, and returns nothing.

    whole: refuses those without what the public op makes itself.
    """

    def taking(into: Callable[[Any], Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> None:
            all_given = given(*arguments)
            whole(all_given)
            into(all_given)

        return run

    return define(schema, cuda=taking(cuda), cpu=taking(cpu), fake=taking(check))


class Pair(NamedTuple):
    """One op under two names."""

    returning: Any  # (*inputs, *more) -> new outputs
    writing: Any  # (*inputs, *outputs)

    def run(self, inputs: Sequence[Any], out: Any, *more: Any) -> Any:
        """The one output: a new one, or `out`. more: what a new one depends on besides."""
        if out is None:
            return self.returning(*inputs, *more)
        self.writing(*inputs, out)
        return out


def define_pair(
    name: str, inputs: str, outputs: str = "out", *, more: str = "", new: Callable[..., Any],
    cuda: Callable[..., Any], cpu: Callable[..., Any], check: Callable[..., Any],
) -> Pair:  # fmt: skip
    """Register `name(inputs, more)`, which returns outputs, and `<name>_out(inputs, outputs)`.

    new: (*inputs, *more) -> the new output, or a tuple of them; cuda, cpu: (*inputs, *outputs,
    is_given); check: (*inputs, *outputs).
    """
    names = outputs.split()
    num_inputs = inputs.count(",") + 1
    num_tensors = num_inputs + len(names)

    def returning(into: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            made = new(*given)
            into(*given[:num_inputs], *(made if len(names) > 1 else (made,)), False)
            return made

        return run

    def writing(into: Callable[..., Any]) -> Callable[..., None]:
        def run(*given: Any) -> None:
            into(*given)

        return run

    def fake(*given: Any) -> None:
        check(*given[:num_tensors])

    written = [f"Tensor({mark}!) {out}" for mark, out in zip("abcdefg", names, strict=False)]
    results = ", ".join(["Tensor"] * len(names))
    return Pair(
        define(
            f"{name}({', '.join(filter(None, (inputs, more)))}) -> "
            + (f"({results})" if len(names) > 1 else results),
            cuda=returning(cuda), cpu=returning(cpu), fake=returning(fake),
        ),
        define(
            f"{name}_out({', '.join((inputs, *written))}) -> ()", cuda=writing(cuda),
            cpu=writing(cpu), fake=fake,
        ),
    )  # fmt: skip
