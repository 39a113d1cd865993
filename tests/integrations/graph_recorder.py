"""What stands in for CUDA graphs on a CPU, where a replay calls the captured function again; models
and caches with which to step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import tiny_models as tiny
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_hub.integrations import transformers as door
from kernel_hub.integrations.transformers import capturing, step_graphs

LENGTH = 96


class Recorder:
    """A graph: as the device's, a capture runs nothing, and a replay fills the same outputs, from
    the cache's counts on the host as they were at the capture."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.replays = 0
        (cache,) = [x for x in self._cells(run) if hasattr(x, "get_seq_length")]
        self.cache = weakref.ref(cache)
        self.counts = self._counts()
        tensors = step_graphs._tensors_of(cache)
        before = [x.clone() for x in tensors]
        self.outputs = run()
        with torch.inference_mode():
            for x, was in zip(tensors, before, strict=True):
                x.copy_(was)

    def _counts(self) -> list[dict[str, Any]]:
        """What the cache's layers keep on the host."""
        return [
            {name: x for name, x in state.items() if type(x) is int}
            for state in step_graphs._states(self.cache())
        ]

    def _count(self, counts: list[dict[str, Any]]) -> None:
        for layer, each in zip(getattr(self.cache(), "layers", ()), counts, strict=True):
            vars(layer).update(each)

    @staticmethod
    def _cells(run: Any) -> list[Any]:
        """What the function closed over, weak references followed."""
        found = (cell.cell_contents for cell in run.__closure__)
        return [x() if type(x).__name__ == "ReferenceType" else x for x in found]

    def replay(self) -> None:
        self.replays += 1
        now = self._counts()
        self._count(self.counts)
        found = self.run()
        self._count(now)
        for kept, x in zip(self._tensors(self.outputs), self._tensors(found), strict=True):
            kept.copy_(x)

    @staticmethod
    def _tensors(found: Any) -> list[torch.Tensor]:
        tensors: list[torch.Tensor] = []
        step_graphs._mapped(lambda x: tensors.append(x) if torch.is_tensor(x) else None, found)
        return tensors

    def pool(self) -> tuple[int, int]:
        return (0, 1)


@contextmanager
def recorded(monkeypatch: Any) -> Iterator[list[Recorder]]:
    """Graphs of tensors on the CPU; gives those captured so far."""
    made: list[Recorder] = []

    def capture(run: Callable[[], Any], device: Any, pool: Any) -> tuple[Any, Any]:
        assert device.type == "cpu"
        made.append(Recorder(run))
        return made[-1], made[-1].outputs

    monkeypatch.setattr(step_graphs, "_DEVICE", "cpu")
    monkeypatch.setattr(capturing, "is_under_way", lambda: False)
    monkeypatch.setattr(capturing, "capture", capture)
    yield made


def accelerated(family: str, dtype: Any = torch.float32, **more: Any) -> Any:
    own = "eager" if family == "gemma2" else "sdpa"
    found = tiny.with_attention(tiny.model_of(family, dtype, **more), own)
    door.accelerate(found, graphs=True)
    return found


class Chat:
    """A cache and what it has seen."""

    def __init__(self, model: Any, batch_size: int = 1, prompt: int = 11, seed: int = 0) -> None:
        self.cache = transformers.StaticCache(
            config=model.config, max_batch_size=batch_size, max_cache_len=LENGTH, device="cpu",
            dtype=model.dtype,
        )  # fmt: skip
        self.tokens = tiny.tokens_of(batch_size, LENGTH, seed)
        self.at = 0
        self.say(model, prompt)

    def say(self, model: Any, count: int = 1, **more: Any) -> Any:
        """Outputs of the next tokens."""
        behind = self.at + count
        positions = torch.arange(self.at, behind)
        given = {
            "input_ids": self.tokens[:, self.at : behind], "past_key_values": self.cache,
            "position_ids": positions[None], "cache_position": positions, **more,
        }  # fmt: skip
        self.at = behind
        if torch.is_grad_enabled():
            with torch.no_grad():
                return model(**given)
        return model(**given)

    def check(self, model: Any, count: int = 1) -> None:
        """The next tokens' logits are those of the whole sequence."""
        for _ in range(count):
            self.check_after(model, self.say(model))

    def check_after(self, model: Any, outputs: Any) -> None:
        """The same of outputs."""
        whole = tiny.logits_of(model, input_ids=self.tokens[:, : self.at])
        torch.testing.assert_close(outputs.logits[:, -1], whole[:, -1], atol=2e-5, rtol=1e-4)


class Waits(TorchDispatchMode):
    """Calls that wait for a device, by name."""

    found: ClassVar[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def passed() -> list[str]:
    """Why steps were not for graphs."""
    return [what for what in door.report()["passed"] if what.startswith("step graphs")]


def replays() -> int:
    """Steps by graphs."""
    return door.report()["taken"].get("step graphs", 0)


def generated(tokens: Any, model: Any) -> tuple[Any, Any]:
    """Greedy tokens and their logits."""
    mask = torch.ones_like(tokens)
    if len(tokens) > 1:
        mask[1, :7] = 0
    found = model.generate(
        tokens, attention_mask=mask, max_new_tokens=8, do_sample=False, output_logits=True,
        cache_implementation="static", return_dict_in_generate=True,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


def same_generated(tokens: Any, *models: Any) -> None:
    """Two models' are the same, bit by bit."""
    found, other = (generated(tokens, model) for model in models)
    assert all(map(torch.equal, found, other))
