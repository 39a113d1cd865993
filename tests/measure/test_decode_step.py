"""A decode step of an engine, op by op: what is counted, and that the engine goes on as before."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub import ops  # noqa: E402
from kernel_hub.cli.parts import step_report  # noqa: E402
from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.requests import SamplingParams  # noqa: E402
from kernel_hub.errors import RequestError  # noqa: E402
from kernel_hub.measure.rates import Roofs  # noqa: E402
from kernel_hub.measure.steps.decode import DecodeStep, decode_step  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_by_lot(lot: random.Random, family: str) -> dict[str, Any]:
    return {
        "model_type": family, "vocab_size": 96, "hidden_size": 32 * lot.randint(1, 3),
        "intermediate_size": 32 * lot.randint(1, 4), "num_hidden_layers": lot.randint(1, 3),
        "num_attention_heads": 4, "num_key_value_heads": lot.choice([1, 2, 4]), "head_dim": 32,
        "max_position_embeddings": 256, "num_local_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip


def totals(step: DecodeStep, *ops: str) -> tuple[float, float]:
    """Bytes and operations of all calls of these ops."""
    found = [kind for kind in step.kinds if kind.op in ops]
    return sum(k.count * k.num_bytes for k in found), sum(k.count * k.num_flops for k in found)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mixtral", "olmo2"])
def test_bytes_and_operations_are_those_of_weights_and_cache(family: str) -> None:
    lot = random.Random(family)
    config = config_by_lot(lot, family)
    engine = Engine.random(config, device="cpu", cache_tokens=1024)
    prompts = [[lot.randrange(96) for _ in range(lot.randint(1, 80))] for _ in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=20)
    expected = engine.generate(prompts, params)
    step = decode_step(engine, prompts)
    assert [kind.count * kind.time_us for kind in step.kinds] == sorted(
        (kind.count * kind.time_us for kind in step.kinds), reverse=True
    )
    assert len(step.order) == sum(kind.count for kind in step.kinds) and step.num_sequences == 3
    weights, hidden = engine.runner.model.weights, config["hidden_size"]
    dense = [weights.head] + [own.o for own in weights.layers] + [own.qkv for own in weights.layers]
    routers = [own.router for own in weights.layers if own.router is not None]
    if not routers:
        dense += [x for own in weights.layers for x in (own.gate_up, own.down)]
    num_bytes, num_flops = totals(step, "linear", "gated_linear", "qkv_linear")
    assert num_flops == 2 * 3 * sum(x.numel() for x in (*dense, *routers))
    least = sum(x.nbytes for x in (*dense, *routers))
    assert least < num_bytes < least + len(step.order) * 3 * 4 * 4 * (hidden + 512)
    # A token reads what was before it and itself.
    kv_bytes = 2 * 32 * 2 * config["num_key_value_heads"]
    attended = [kind for kind in step.kinds if kind.op == "decode_attention"]
    keys = int(attended[0].shape.split(", ")[1].split()[0])
    assert keys > sum(map(len, prompts)) + 3 * 12 and (keys - sum(map(len, prompts))) % 3 == 0
    layers = config["num_hidden_layers"]
    num_bytes, num_flops = totals(step, "decode_attention")
    assert num_flops == layers * 4 * keys * 4 * 32
    outside = layers * 3 * (2 * 2 * 4 * 32 + 4 + 4 * 4)  # queries, outputs, lengths, tables
    assert 0 < num_bytes - layers * keys * kv_bytes <= outside
    if routers:
        num_bytes, num_flops = totals(step, "grouped_linear")
        a_layer = 2 * 6 * (weights.layers[0].gate_up[0].numel() + weights.layers[0].down[0].numel())
        assert num_flops == layers * a_layer
        every = sum(own.gate_up.nbytes + own.down.nbytes for own in weights.layers)
        assert num_bytes < every * 1.5
    assert engine.stats()["pages_used"] == 0 and engine.generate(prompts, params) == expected
    assert ops.linear.__module__.startswith("kernel_hub.ops") and callable(ops.sample)


def test_what_cannot_be_reported_is_refused() -> None:
    engine = Engine.random("tiny", device="cpu", cache_tokens=64)
    with pytest.raises(RequestError, match="no room"):
        decode_step(engine, [[1] * 60])
    assert not engine.has_work
    drafting = Engine.random("tiny", device="cpu", cache_tokens=512, drafts=4)
    with pytest.raises(RequestError, match="drafts"):
        decode_step(drafting, [[1, 2, 3] * 20])
    assert not drafting.has_work and drafting.stats()["pages_used"] == 0
    engine.group.world = 2
    with pytest.raises(RequestError, match="several"):
        decode_step(engine, [[1]])


def test_a_share_is_of_the_nearer_limit_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = decode_step(Engine.random("tiny", device="cpu", cache_tokens=256), [[1] * 20])
    assert all(kind.limit_us is None and kind.share is None for kind in step.kinds)
    kinds = [replace(kind, limit_us=kind.time_us / 4) for kind in step.kinds]
    step = replace(step, kinds=kinds, roofs=Roofs(4.0, {"bf16": 800.0}))
    assert {kind.share for kind in step.kinds} == {0.25}
    step_report.show(step)
    out = capsys.readouterr().out
    assert out.count("25%") >= len(kinds) and "copies 4.00 TB/s" in out
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    step_report.draw(step, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
