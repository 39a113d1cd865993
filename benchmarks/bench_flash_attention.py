"""flash_attention, and of packed tensors flash_attention_qkvpacked, beside torch's flash
(FlashAttention-2) and cuDNN backends, FlashAttention-3 and FlashInfer, in one run.

Each contender's output is held against fp64 first, on the last queries of a sequence. Burst: 6 ms
of launches after 35 ms of idling, contenders in random order, medians of the rounds. Sustained:
the same after half a second of launches back to back, when the card runs at its power cap. Inputs
of a case are larger than the L2. TFLOP/s count 2 (head_dim of q + that of v) operations a (query,
key) pair seen. FlashAttention-3 comes from fa3-fwd, or from xformers where it is fp16 or paged.
Writes benchmarks/results/<gpu>_attention.json; `plot_attention.py` draws it.

Peers that are not installed or cannot run a case are left out, and named on stderr.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from flash_attention_cases import PORTABLE, Case, dense, packed, paged, varlen
from harness import DTYPES, OURS, Report, arguments, burst, sustained
from lot.attention_peers import CUDNN, FA2, FA3, FLASHINFER, Launch

from kernel_hub.testing.compare import compare

# head_dim -> heads of the protocol: 2048 columns in all.
HEADS = {64: 32, 128: 16, 256: 8}
SHAPES = ((32, 512), (16, 1024), (8, 2048), (4, 4096), (2, 8192), (1, 16384))
SUSTAINED = (1024, 16384)
MODELS = {"Llama 8B": (32, 8), "Llama 70B": (64, 8), "Llama 70B TP8": (8, 1)}


def protocol(dtype: torch.dtype, quick: bool) -> Iterator[tuple[Callable[[], Case], bool]]:
    """Every head_dim and mask; of fp16 every second length, and none of it sustained."""
    is_bf16 = dtype == torch.bfloat16
    shapes = SHAPES if is_bf16 and not quick else SHAPES[1::2]
    for head_dim, heads in HEADS.items():
        for causal in (False, True):
            for batch, seqlen in shapes:
                yield partial(
                    dense, "prefill", batch, seqlen, (heads, heads), head_dim, causal, dtype
                ), is_bf16 and seqlen in SUSTAINED and not quick  # fmt: skip


def cases(options: argparse.Namespace) -> Iterator[tuple[Callable[[], Case], bool]]:
    """(how to make it, whether it is measured sustained too), section by section."""
    bf16 = torch.bfloat16
    for section in options.sections:
        if section == "models":
            for name, heads in MODELS.items():
                for batch, seqlen in ((4, 4096),) if options.quick else ((4, 4096), (1, 32768)):
                    yield partial(dense, name, batch, seqlen, heads, 128, True, bf16), False
        if section == "deepseek":  # its prefill, heads of one GPU of eight
            for (batch, seqlen), causal in itertools.product(
                ((4, 4096), (1, 16384)), (False, True)
            ):
                yield partial(
                    dense, "DeepSeek TP8", batch, seqlen, (16, 16), 192, causal, bf16, 128
                ), False  # fmt: skip
        if section == "varlen":
            for causal in (True,) if options.quick else (False, True):
                yield partial(varlen, (16, 16), 128, causal, bf16), False
        if section == "paged":
            for page_size in (16, 64, 256):
                yield partial(paged, page_size, 4, 4096, 4096, (32, 8), 128, bf16), False
                if not options.quick:
                    yield partial(paged, page_size, 4, 1024, 16384, (32, 8), 128, bf16), False
        if section == "packed":  # a ViT, a prompt, training
            for batch, seqlen, heads, head_dim, causal in (
                (64, 577, (16, 16), 64, False), (1, 4096, (32, 8), 128, True),
                (4, 2048, (25, 25), 64, True),
            ):  # fmt: skip
                yield partial(packed, batch, seqlen, heads, head_dim, causal), False
        if section in DTYPES:
            yield from protocol(DTYPES[section], options.quick)


def of_part(
    found: Iterator[tuple[Callable[[], Case], bool]], part: str
) -> Iterator[tuple[Callable[[], Case], bool]]:
    """Every case, or with "2/5" each fifth one from the second."""
    number, count = (int(word) for word in part.split("/"))
    for index, each in enumerate(found):
        if index % count == number - 1:
            yield each


def usable(case: Case, wanted: Sequence[str]) -> dict[str, Launch]:
    """The contenders that run and are right; raises AssertionError where ours is wrong."""
    launches = {}
    for name, make in case.contenders.items():
        if not name.startswith(OURS) and name not in wanted:
            continue
        try:
            launch = make()
            out = launch()
            torch.cuda.synchronize()
            wrong = ""
            for rows, truth, own in case.checks:
                result = compare(rows(out), truth, own, name=f"{case.name}: {name}")
                if not (result.ok or (not name.startswith(OURS) and result.error < 0.05)):
                    wrong = result.message
        except Exception as error:  # a peer that fails is left out, and said
            if name == OURS:
                raise
            wrong = f"{type(error).__name__}: {str(error)[:200]}"
        if wrong and name.startswith(OURS):
            raise AssertionError(wrong)
        if wrong:
            print(f"left out in {case.name}: {name}: {wrong}", file=sys.stderr)
        else:
            launches[name] = launch
    return launches


def main() -> int:
    """Measure, write, print."""
    options = arguments(
        __doc__,
        rounds=15,
        quick={"rounds": 5, "peers": f"{FA2},{CUDNN},{FA3}"},
        sections="models,deepseek,varlen,paged,packed,bf16,fp16",
        peers=f"{FA2},{CUDNN},{FA3},{FLASHINFER}",  # the last compiles
        more=lambda parser: parser.add_argument(
            "--part", help="2/5: each fifth case from the second; the rows of the others stay"
        ),
    )
    report = Report("attention", options)
    for make, is_long in of_part(cases(options), options.part or "1/1"):
        case = make()
        try:
            launches = usable(case, options.peers)
        except AssertionError as error:
            report.failures.append(str(error))
            continue
        ways = {"burst": burst, "sustained": sustained} if is_long else {"burst": burst}
        for way, measure in ways.items():
            if way == "sustained":  # the nearest peers alone: it takes its time
                launches = {n: each for n, each in launches.items() if n not in (PORTABLE, FA2)}
            rates = {
                name: [case.flops / ms / 1e9 for ms in values]
                for name, values in measure(launches, options.rounds).items()
            }
            medians = report.case(f"{case.name} {way}", rates, "TFLOP/s", ratio_to=FA2)
            for peer, rate in medians.items():
                if peer != OURS:
                    report.ahead(peer, medians[OURS] / rate)
            shown = ", ".join(f"{name} {rate:.0f}" for name, rate in medians.items())
            print(f"{case.name} {way}: {shown} TFLOP/s", flush=True)
        # What there is so far: a peer may hang in its compiler.
        report.write(report.kept() if options.part else ())
        del case, launches
        torch.cuda.empty_cache()
    return report.finish()


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
