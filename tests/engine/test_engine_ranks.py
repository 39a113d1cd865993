"""Several processes with a share of the model each, by gloo: the answers of one."""

from __future__ import annotations

import json
import os
import random
import socket
from pathlib import Path
from typing import Any, NamedTuple

import drawn
import pytest
import warm

torch = pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.requests import SamplingParams  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 256,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
# (family, KV heads, what differs): heads that are split and that are repeated, norms of all kinds.
MODELS: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 4, {"attention_bias": True, "mlp_bias": True}),
    ("qwen3", 2, {}),
    ("gemma2", 1, {"sliding_window": 20}),
    ("olmo2", 4, {}),
    # All experts: where two are as good, the order of sums would choose.
    ("mixtral", 2, {"num_experts_per_tok": 4}),
]
RANK = """
import json, sys, torch
from kernel_hub.engine.engine import Engine
from kernel_hub.engine.requests import SamplingParams
torch.set_num_threads(1)
answers = []
for config, prompts, params, options in json.loads(sys.argv[1]):
    engine = Engine.random(config, device="cpu", dtype=torch.float16, **options)
    if engine.group.rank:
        engine.follow()
        continue
    found = engine.generate(prompts, [SamplingParams(**own) for own in params])
    answers.append([[a.tokens, a.logprobs, a.error] for a in found])
    engine.close()
print("ANSWERS", json.dumps(answers))
"""


class Lot(NamedTuple):
    """What a model is asked, as JSON says it."""

    config: dict[str, Any]
    prompts: list[list[int]]
    params: list[dict[str, Any]]
    options: dict[str, Any]


def lot_of(model: tuple[str, int, dict[str, Any]], world: int) -> Lot:
    family, num_kv_heads, more = model
    lot = random.Random(f"{family} {world}")
    params: list[dict[str, Any]] = [
        {"temperature": lot.choice([0.0, 0.8]), "seed": lot.getrandbits(30), "max_tokens": 9,
         "logprobs": 96}
        for _ in range(5)
    ]  # fmt: skip
    params[0]["frequency_penalty"] = 0.5
    return Lot(
        {"model_type": family, **SIZES, "num_key_value_heads": num_kv_heads, **more},
        [[lot.randrange(96) for _ in range(lot.randint(1, 40))] for _ in range(5)],
        params,
        {"page_size": 16, "max_tokens_a_pass": 32, "drafts": lot.choice([0, 3])},
    )


def ranks(world: int, *command: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of as many processes, started as torchrun starts them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {
        **os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = [
        warm.start(command, env={**common, "RANK": str(i), "LOCAL_RANK": str(i)})
        for i in range(world)
    ]
    said = [process.wait(timeout=200) for process in started]
    return [(each.returncode, each.stdout, each.stderr) for each in said]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_answers_are_those_of_one_process(world: int) -> None:
    """One model of each kind after the other; of the kinds a run that draws takes three."""
    lots = [lot_of(model, world) for model in drawn.some(MODELS, 3, "ranks", world)]
    said = ranks(world, "-c", RANK, json.dumps(lots))
    assert [code for code, _, _ in said] == [0] * world, said
    answers = json.loads(said[0][1].split("ANSWERS", 1)[1])
    for lot, found in zip(lots, answers, strict=True):
        check_answers(lot, found)


def check_answers(lot: Lot, found: list[Any]) -> None:
    """Tokens are one process' own, but where two are as likely as the sums' order tells apart."""
    alone = Engine.random(lot.config, device="cpu", dtype=torch.float16, **lot.options)
    expected = alone.generate(lot.prompts, [SamplingParams(**own) for own in lot.params])
    num_same = 0
    for (tokens, logprobs, error), answer, params in zip(found, expected, lot.params, strict=True):
        assert error is None and answer.error is None
        for own, other in zip(logprobs, answer.logprobs, strict=True):
            scores, others = dict(map(tuple, own[2])), dict(other.top)
            # fp16 sums in another order.
            assert all(abs(scores[t] - others[t]) < 0.03 for t in range(96))
            if own[0] != other.token:  # from here on the texts are others
                tie = abs(scores[own[0]] - scores[other.token]) < 0.06
                assert tie or params["temperature"]
                break
        else:
            num_same += 1
            assert tuple(tokens) == answer.tokens
    assert num_same >= 3


def test_a_world_that_does_not_divide_is_an_error_on_every_rank() -> None:
    said = ranks(2, "-m", "kernel_hub", "generate", "tiny", "--device", "cpu", "--prompt", "a")
    assert [code for code, _, _ in said] == [0, 0], said
    assert said[0][1].strip() and not said[1][1]
    said = ranks(3, "-m", "kernel_hub", "generate", "tiny", "--device", "cpu", "--prompt", "a")
    for code, _, err in said:
        assert code == 2 and "3 processes do not divide num_attention_heads 4" in err, err


def test_a_shard_that_one_rank_lacks_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """Each process has a folder of its own here; rank 1's has no weights."""
    pytest.importorskip("safetensors", reason="models are read by safetensors")
    script = """
import os, sys
from kernel_hub.cli import main
sys.exit(main(["generate", sys.argv[1] + os.environ["RANK"], "--device", "cpu", "--prompt", "a"]))
"""
    from safetensors.torch import save_file

    from kernel_hub.engine.config import NAMED, ModelConfig
    from kernel_hub.engine.weights import Random, expected

    config = ModelConfig.from_dict(NAMED["tiny"])
    source = Random(config, torch.device("cpu"))
    for rank in "01":
        folder = tmp_path / f"model{rank}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(NAMED["tiny"]))
        tensors = {n: source.read(n, 0, 0, s[0]).clone() for n, s in expected(config).items()}
        save_file(tensors, folder / "model.safetensors")
    assert [code for code, _, _ in ranks(2, "-c", script, str(tmp_path / "model"))] == [0, 0]
    (tmp_path / "model1" / "model.safetensors").unlink()  # and then the configuration, too
    said = ranks(2, "-c", script, str(tmp_path / "model"))
    for code, _, err in said:
        assert code == 2 and "no file 'model.safetensors'" in err, err
    assert "rank 1 of 2" in said[0][2]
    (tmp_path / "model1" / "config.json").unlink()
    for code, _, err in ranks(2, "-c", script, str(tmp_path / "model")):
        assert code == 2 and "no config.json" in err, err


def test_a_rank_that_dies_ends_the_others_with_an_error() -> None:
    script = """
import os, sys
from kernel_hub.cli import main
from kernel_hub.engine.runner import Runner
run, passes = Runner.run, []
def dying(self, batch):
    passes.append(1)
    if os.environ["RANK"] == "1" and len(passes) == 3:
        os._exit(9)
    return run(self, batch)
Runner.run = dying
sys.exit(main(["generate", "tiny", "--device", "cpu", "--prompt", "a"]))
"""
    (code, _, err), (killed, _, _) = ranks(2, "-c", script)
    assert (code, killed) == (2, 9) and "2 processes failed" in err, err
