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
        is_older = "added_tokens_decoder" not in self._config and older.is_file()
        try:
            self._names = self._named(read_json(older) if is_older else {}, vocab_size)
        except (AttributeError, TypeError, ValueError) as error:
            where = older if is_older else path
            raise ModelError(f"{where}: no tokens of a tokenizer: {error}") from None
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

    def _named(self, older: dict[str, Any], vocab_size: int | None) -> dict[str, str]:
        """Special tokens by name, as templates know them; those of the files that tokenizer.json
        lacks, or has otherwise, are added, as transformers does. Not where the model has no row
        for them: there they are text."""
        added: Any = package("tokenizers", "models' tokenizers are run").AddedToken
        own, known = {**self._config, **older}, self.fast.get_added_tokens_decoder()
        keys = ("extra_special_tokens", "additional_special_tokens")  # a list, or more names
        extra = [x for file in (self._config, older) for key in keys if (x := file.get(key))]
        told, texts = known, {token.content for token in known.values()}
        if "added_tokens_decoder" in own:
            told = {int(i): added(**x) for i, x in (own["added_tokens_decoder"] or {}).items()}
        more = {told[i].content: told[i] for i in sorted(told)}
        texts |= more.keys()

        def taken(value: Any) -> str:
            """The text of a special token, which is added where it is none yet."""
            given = {"special": True, **(value if isinstance(value, dict) else {"content": value})}
            given.pop("__type", None)
            token = added(**given)
            if token.content not in texts:
                more[token.content] = token
            return token.content

        named = {key: x for key, x in own.items() if key.endswith("_token")}
        for each in extra:
            named |= each if isinstance(each, dict) else {}
        names = {
            key: taken(named[key])
            for key in sorted(named, key=lambda key: (*_SPECIAL, key).index(key))
            if isinstance(named[key], (str, dict))  # not add_bos_token, say
        }
        for value in next((each for each in extra if isinstance(each, list)), ()):
            taken(value)
        for text in more.keys() & {*names.values()}:
            more[text].special = True
        if vocab_size is not None:
            first = max(self.fast.get_vocab_size(False), *(i + 1 for i in known), 0)
            lacks = [text for text in more if self.fast.token_to_id(text) is None]
            for text in lacks[max(0, vocab_size - first) :]:
                del more[text]
        self.fast.add_tokens([*more.values()])
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
