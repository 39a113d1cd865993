"""Text to tokens and back: a model's own tokenizer and chat template, and text as it streams."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import ModelError, RequestError
from .config import package, read_json

_FILE = "tokenizer.json"
# Of other tokenizers: sentencepiece's, mistral-common's, slow ones of transformers, tiktoken's.
_OTHERS = ("tokenizer.model*", "tekken.json", "vocab.json", "spiece.model", "*.tiktoken")
_SPECIAL = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
# A template's tag around what a model is trained on: all of it is rendered.
_TRAINED = re.compile(r"(?<=\{%)([-+]?\s*)(end)?generation(?=\s*[-+]?%\})")
_HALF = "\ufffd"  # what a character's bytes decode to before all are there
_WINDOW = 4  # tokens that are decoded again with each new one, and about as many before them
_MOST_HELD = 64  # tokens after which what is no character yet is not going to be one
Decode = Callable[[Iterable[int]], str]


class Bytes:
    """Tokens that are bytes of UTF-8: of models without a tokenizer, such as random ones."""

    def encode(self, text: str, is_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Tokens above 255 are no text."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> list[int]:
        raise RequestError("the model has no chat template: ask for a completion", argument="model")


class Unread(Bytes):
    """Of a folder whose tokenizer is none that the engine reads: token ids alone are taken."""

    def __init__(self, path: Path) -> None:
        self._said = (
            f"{path.parent} has {path.name} but no tokenizer.json, which the engine reads: "
            "transformers' AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes one"
        )

    def encode(self, text: str, is_special: bool = True) -> list[int]:
        raise RequestError(self._said, argument="prompt")

    def chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> list[int]:
        raise RequestError(self._said, argument="messages")


class Tokenizer:
    """tokenizer.json and the chat template of a model's folder."""

    def __init__(self, folder: Path, vocab_size: int | None = None) -> None:
        """vocab_size: of the model. Raises ModelError naming a file that is no such one."""
        fast, path = package("tokenizers", "models' tokenizers are run").Tokenizer, folder / _FILE
        try:
            self.fast = fast.from_file(str(path))
        except Exception as error:  # the package's own class is `Exception`
            raise ModelError(f"{path}: no tokenizer: {error}") from error
        # A prompt is whole and alone, whatever texts were when the file was written.
        self.fast.no_truncation()
        self.fast.no_padding()
        path = folder / "tokenizer_config.json"
        self._config = read_json(path) if path.is_file() else {}
        older = folder / "special_tokens_map.json"
        if "added_tokens_decoder" not in self._config and older.is_file():
            self._config |= read_json(older)
        try:
            self._names = self._named(vocab_size)
        except (AttributeError, TypeError, ValueError) as error:
            raise ModelError(f"{path}: no tokens of a tokenizer: {error}") from None
        # Text, or several by name; and files of theirs, as transformers writes them.
        given = self._config.get("chat_template")
        if not isinstance(given, list):
            given = [{"name": "default", "template": given}]
        try:
            self._templates = {each["name"]: each["template"] for each in given}
        except (KeyError, TypeError) as error:
            raise ModelError(f"{path}: chat_template: no templates by name: {error!r}") from None
        for file in (*folder.glob("chat_template.jinja"), *folder.glob("additional*/*.jinja")):
            name = file.stem.replace("chat_template", "default")
            self._templates[name] = file.read_text(encoding="utf-8")

    def _named(self, vocab_size: int | None) -> dict[str, str]:
        """Special tokens by name, as templates know them; those of tokenizer_config.json that
        tokenizer.json lacks, or has otherwise, are added, as transformers does. Not where the model
        has no row for them: with a token more than rows no grammar can be followed."""
        added: Any = package("tokenizers", "models' tokenizers are run").AddedToken
        extra, own = self._config.get("extra_special_tokens"), self._config
        told = [
            added(**token) for _, token in sorted(
                (own.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])
            )
        ]  # fmt: skip
        known = [*self.fast.get_added_tokens_decoder().values()]
        more = [token for token in told if repr(token) not in {*map(repr, known)}]
        spelled = {token.content: token for token in told or known}
        names, tokens = dict[str, str](), dict[str, Any]()
        every = {**own, **(extra if isinstance(extra, dict) else {})}
        for name in sorted(every, key=lambda name: (*_SPECIAL, name).index(name)):
            if not name.endswith("_token") or not isinstance(value := every[name], (str, dict)):
                continue  # add_bos_token, say
            if isinstance(value, dict):
                value = {key: x for key, x in value.items() if key not in ("__type", "special")}
                value = added(**value, special=True)
            text = names[name] = value if isinstance(value, str) else value.content
            tokens.setdefault(text, spelled.get(text, value))
        texts = {token.content for token in (*known, *more)}
        more += [
            added(value, special=True) if isinstance(value, str) else value
            for text, value in tokens.items() if text not in texts
        ]  # fmt: skip
        lacks = [token.content for token in more if self.fast.token_to_id(token.content) is None]
        size = self.fast.get_vocab_size()
        over = lacks[max(0, vocab_size - size) :] if vocab_size else []
        self.fast.add_tokens([token for token in more if token.content not in over])
        self.fast.add_special_tokens([
            added(value, special=True, normalized=False) if isinstance(value, str) else value
            for text, value in tokens.items() if text not in over
        ])  # fmt: skip
        return names

    def encode(self, text: str, is_special: bool = True) -> list[int]:
        """is_special: with the tokens that begin or end a text."""
        return self.fast.encode(text, add_special_tokens=is_special).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.fast.decode(list(ids), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> list[int]:
        """The prompt of a conversation. Raises RequestError with the template's own words."""
        given = {"add_generation_prompt": True, "tools": None, "documents": None, **more}
        template = given["tools"] and self._templates.get("tool_use")
        if (template := template or self._templates.get("default")) is None:
            return Bytes().chat(messages)
        from jinja2 import TemplateError, sandbox

        def refuse(message: str) -> None:
            raise TemplateError(message)

        world = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        world.filters["tojson"] = lambda x, **how: json.dumps(x, **{"ensure_ascii": False, **how})
        world.globals["raise_exception"] = refuse
        world.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            template = _TRAINED.sub(lambda at: at[1] + ("endif" if at[2] else "if true"), template)
            text = world.from_string(template).render(
                {**self._names, **given, "messages": messages}
            )
        except Exception as error:  # a template's own
            message = f"the model's chat template refuses these messages: {error}"
            raise RequestError(message, argument="messages") from error
        return self.encode(text, is_special=False)


def text_of(folder: Path, vocab_size: int | None = None) -> Bytes | Tokenizer:
    """What reads and writes the texts of a model's folder; bytes where it has no tokenizer."""
    if (folder / _FILE).is_file():
        return Tokenizer(folder, vocab_size)
    others = (path for name in _OTHERS for path in folder.glob(name))
    return Unread(path) if (path := next(others, None)) else Bytes()


class TextStream:
    """The text of one request, token by token: nothing that may yet change or be a stop string."""

    def __init__(self, decode: Decode, stop: Sequence[str], before: Sequence[int] = ()) -> None:
        """before: tokens that the text goes on from; some decoders part them by a blank."""
        self._decode, self._stop = decode, tuple(stop)
        # Most tokens have none of the characters that a stop string begins with.
        first = "".join(each[0] for each in stop)
        self._first = re.compile(f"[{re.escape(first)}]").search if stop else lambda text: None
        # The last tokens, of which the first are there for what joins them to those behind them.
        self._tokens = list(before[-_WINDOW:])
        # Their text, until more is shown: where it ends in half a character more may complete it.
        self._given = decode(self._tokens)
        # Of them; characters of their text that were handed on.
        self._num_old, self._shown = len(self._tokens), len(self._given)
        self._held, self.is_stopped = "", False

    def push(self, token: int) -> str:
        """What may be shown after one more token."""
        self._tokens.append(token)
        fresh = self._decode(self._tokens)
        stable = fresh.rstrip(_HALF) if len(self._tokens) <= _MOST_HELD else fresh
        if self._given:
            alike = takewhile(
                lambda both: both[0] == both[1], zip(self._given, fresh, strict=False)
            )
            self._shown = len([*alike])
        found = stable[self._shown :]
        self._given = "" if found else self._given
        self._shown = max(self._shown, len(stable))
        if stable == fresh and len(self._tokens) - self._num_old >= _WINDOW:
            del self._tokens[: self._num_old]
            self._num_old, self._shown = len(self._tokens), len(self._decode(self._tokens))
            self._given = ""
        return self._checked(found)

    def flush(self) -> str:
        """The rest, at the end."""
        found = self._held + self._decode(self._tokens)[self._shown :]
        self._held, self._tokens = "", []
        return found

    def _checked(self, text: str) -> str:
        """Less what may become a stop string, and what comes after one."""
        if not self._held and not self._first(text):
            return text
        self._held += text
        ends = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            found, self._held = self._held[: min(ends)], ""
            return found
        shown = min(map(self._begun, self._stop))
        found, self._held = self._held[:shown], self._held[shown:]
        return found

    def _begun(self, stop: str) -> int:
        """Where in what is held the stop string may have begun; its end: nowhere."""
        held, at = self._held, max(0, len(self._held) - len(stop) + 1)
        while (at := held.find(stop[0], at)) >= 0 and not stop.startswith(held[at:]):
            at += 1
        return at if at >= 0 else len(held)
