"""The engine beside transformers: the same folder, the same tokens, for every family it runs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the ops are torch ops")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("safetensors", reason="models are read by safetensors")

from tiny_models import EXPERTS, FAMILIES, logits_of, model_of, truth_of  # noqa: E402

from kernel_hub.engine.engine import Engine  # noqa: E402
from kernel_hub.engine.requests import SamplingParams  # noqa: E402
from kernel_hub.testing.compare import check  # noqa: E402

VOCAB = 199


def saved(family: str, folder: Path, dtype: Any, **more: Any) -> Any:
    """A model of the family, and its folder as save_pretrained writes it."""
    model = model_of(family, dtype, **more)
    model.save_pretrained(folder)
    return model


def check_answers(model: Any, engine: Engine, prompts: list[list[int]], count: int) -> None:
    """Scores of all tokens at every place by the numeric rule, and each choice the best or a tie.

    Truth is the model in fp64 on the very tokens that the engine chose.
    """
    params = SamplingParams(temperature=0.0, max_tokens=count, logprobs=VOCAB)
    answers = engine.generate(prompts, params)
    model.config._experts_implementation = "eager"  # others have no fp64
    truth_model = truth_of(model)
    ours, truth, own = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        assert (answer.error, answer.finish_reason, len(answer.tokens)) == (None, "length", count)
        tokens = torch.tensor([[*prompt, *answer.tokens]])
        for place in answer.logprobs:
            row = torch.empty(VOCAB)
            for token, score in place.top:
                row[token] = score
            assert place.logprob == row[place.token] == row.max()
            ours.append(row)
        for each, found in ((truth_model, truth), (model, own)):
            logits = logits_of(each, input_ids=tokens)[0, len(prompt) - 1 : -1]
            found.append(torch.log_softmax(logits.double(), -1))
    scores, theirs = torch.cat(truth), torch.cat(own).to(model.dtype)
    check(torch.stack(ours), scores, theirs)
    chosen = torch.tensor([token for answer in answers for token in answer.tokens])
    behind = scores.max(-1).values - scores.gather(-1, chosen[:, None])[:, 0]
    error = (theirs.double() - scores).abs().max()
    assert (behind <= 4 * error).all(), f"{behind.max():.3g} behind the best, error {error:.3g}"


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS])
def test_families(family: str, tmp_path: Path) -> None:
    """Prompts longer than a window and a pass, beside short ones, in a cache of small pages."""
    lot = random.Random(family)
    dtype = lot.choice([torch.bfloat16, torch.float16])
    model = saved(family, tmp_path, dtype)
    engine = Engine.from_pretrained(
        tmp_path, dtype=dtype, device="cpu", page_size=16, max_tokens_a_pass=lot.choice([48, 512])
    )
    prompts = [
        [lot.randrange(1, VOCAB) for _ in range(length)] for length in (1, 17, lot.randint(60, 120))
    ]
    check_answers(model, engine, prompts, 12)
