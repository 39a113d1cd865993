"""Several processes with a share of the model each: the answers of one. By gloo; by NCCL where
there are GPUs for it."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import drawn
import pytest
import warm
from free_port import free_port

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
from kernel_hub.engine.requests import Request, SamplingParams
torch.set_num_threads(1)
answers = []
for config, prompts, params, options in json.loads(sys.argv[1]):
    dtype = getattr(torch, options.pop("dtype"))
    engine = Engine.random(config, dtype=dtype, **options)
    if engine.group.rank:
        engine.follow()
        continue
    params = [SamplingParams(**own) for own in params]
    for i, prompt in enumerate(prompts):  # half of them end by the way
        engine.submit(Request(f"early {i}", tuple(prompt), params[i]))
    for i in range(4):
        engine.step()
        engine.abort(f"early {2 * i}")
    found = engine.generate(prompts, params)
    assert not engine.stats()["pages_used"]
    assert engine.runner.has_graphs == bool(engine.runner._graphs)
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


def lot_of(
    model: tuple[str, int, dict[str, Any]], world: int, device: str = "cpu", dtype: str = "float16"
) -> Lot:
    family, num_kv_heads, more = model
    lot = random.Random(f"{family} {world} {device} {dtype}")
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
        {
            "page_size": 16 if device == "cpu" else 64, "max_tokens_a_pass": 32,
            "drafts": lot.choice([0, 3]), "device": device, "dtype": dtype, "cache_tokens": 8192,
        },
    )  # fmt: skip


def ranks(world: int, *command: str, **more: str) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of as many processes, started as torchrun starts them."""
    common = {
        **os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more,
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
    options = {**lot.options, "dtype": getattr(torch, lot.options["dtype"])}
    near = 0.03 if options["dtype"] == torch.float16 else 0.12
    alone = Engine.random(lot.config, **options)
    expected = alone.generate(lot.prompts, [SamplingParams(**own) for own in lot.params])
    num_same = 0
    for (tokens, logprobs, error), answer, params in zip(found, expected, lot.params, strict=True):
        assert error is None and answer.error is None
        for own, other in zip(logprobs, answer.logprobs, strict=True):
            scores, others = dict(map(tuple, own[2])), dict(other.top)
            # Sums in another order.
            assert all(abs(scores[t] - others[t]) < near for t in range(96))
            if own[0] != other.token:  # from here on the texts are others
                tie = abs(scores[own[0]] - scores[other.token]) < 2 * near
                assert tie or params["temperature"]
                break
        else:
            num_same += 1
            assert tuple(tokens) == answer.tokens
    assert num_same >= (3 if options["dtype"] == torch.float16 else 1)


def gpus_of(world: int) -> None:
    """Skip where there are not so many."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("world", [2, 4])
def test_answers_of_gpus_are_those_of_one(world: int, dtype: str) -> None:
    """Graphs with collectives inside; every kind of model."""
    gpus_of(world)
    lots = [lot_of(model, world, "cuda", dtype) for model in MODELS]
    said = ranks(world, "-c", RANK, json.dumps(lots))
    assert [code for code, _, _ in said] == [0] * world, said
    answers = json.loads(said[0][1].split("ANSWERS", 1)[1])
    for lot, found in zip(lots, answers, strict=True):
        check_answers(lot, found)


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
        tensors = {n: source.read(n, s, 0, 0, s[0]).clone() for n, s in expected(config).items()}
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


DYING = """
import os, sys
from kernel_hub.cli import main
from kernel_hub.engine.runner import Runner
run, passes = Runner.run, []
def dying(self, batch):
    passes.append(1)
    if os.environ["RANK"] == "1" and len(passes) == int(sys.argv[2]):
        os._exit(9)
    return run(self, batch)
Runner.run = dying
sys.exit(main(["generate", "tiny", "--device", sys.argv[1], "--prompt", "a"]))
"""


def test_a_rank_that_dies_ends_the_others_with_an_error() -> None:
    (code, _, err), (killed, _, _) = ranks(2, "-c", DYING, "cpu", "3")
    assert (code, killed) == (2, 9) and "2 processes failed" in err, err


@pytest.mark.gpu
@pytest.mark.parametrize("death", [1, 2, 3, 9])
def test_a_rank_that_dies_leaves_no_gpu_waiting(death: int) -> None:
    """In the first chunk of a prompt, before a graph is made, and while one runs."""
    gpus_of(2)
    (code, _, err), (killed, _, _) = ranks(2, "-c", DYING, "cuda", str(death))
    assert (code, killed) == (2, 9) and "2 processes failed" in err, err


def test_a_device_that_waits_for_a_rank_that_died_is_not_waited_for() -> None:
    """An event that never comes, as where a collective lacks one of its ranks."""
    script = """
import os, sys, time, torch
from kernel_hub.engine.parallel import Group
group = Group(torch.device("cpu"))
class Never:
    def query(self):
        return False
class Late:
    began = time.monotonic()
    def query(self):
        return time.monotonic() > self.began + 0.2
group.wait(Late())
if group.rank == int(sys.argv[1]):
    os._exit(9)
group.wait(Never())
"""
    said = ranks(4, "-c", script, "2")
    assert [code for code, _, _ in said] == [1, 1, 9, 1], said
    assert "RankError: rank 2 of 4 has ended" in said[0][2], said[0][2]
    for _, _, err in (said[1], said[3]):  # rank 0 has ended by then
        assert "RankError: rank 0 of 4 has ended" in err, err


def test_more_processes_than_gpus_is_an_error_on_every_rank() -> None:
    script = """
import sys, torch
from kernel_hub.cli import main
torch.cuda.device_count = lambda: 1
sys.exit(main(["generate", "tiny", "--device", "cuda", "--prompt", "a"]))
"""
    for code, _, err in ranks(2, "-c", script, LOCAL_WORLD_SIZE="2"):
        assert code == 2 and "2 processes take a GPU each, and there are 1" in err, err


def test_the_cache_is_that_of_the_rank_with_the_least_memory() -> None:
    lot = random.Random(f"{os.environ.get(drawn.VARIABLE)} memory of ranks")
    tokens = [lot.randint(64, 4096) for _ in range(4)]
    script = """
import os, sys
from kernel_hub.engine import engine, model
from kernel_hub.engine.requests import SamplingParams
rank, tokens = int(os.environ["RANK"]), [*map(int, sys.argv[1:])]
model.CPU_CACHE_TOKENS = tokens[rank]
made = engine.Engine.random("tiny", device="cpu", page_size=16, **{"max_batch": 2})
assert made.stats()["pages_total"] == min(tokens) // 16, made.stats()
if rank:
    made.follow()
else:
    assert not made.generate([[1] * 60], SamplingParams(max_tokens=3))[0].error
    made.close()
"""
    said = ranks(4, "-c", script, *map(str, tokens))
    assert [code for code, _, _ in said] == [0] * 4, said
