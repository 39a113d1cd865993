"""Text as it streams: no half characters, nothing that may become a stop string."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine is torch's")

from kernel_hub.engine.grammars import Grammars
from kernel_hub.engine.text import Bytes, TextStream, text_of
from kernel_hub.errors import RequestError

ALPHABET = "aab€🙂é ]^-\\&["


def test_streams_by_lot() -> None:
    """Whole characters only; together all of the text, cut before the first stop string."""
    lot = random.Random(5)
    for seed in range(500):
        text = "".join(lot.choices(ALPHABET, k=lot.randint(0, 30)))
        stops = ["".join(lot.choices(ALPHABET, k=lot.randint(1, 4))) for _ in range(seed % 3)]
        stream, shown = TextStream(Bytes().decode, stops), ""
        for token in text.encode():
            piece = stream.push(token)
            assert "\ufffd" not in piece, seed
            shown += piece
            # What follows it could still make a stop string of the rest.
            assert not any(stop in shown for stop in stops), seed
            if stream.is_stopped:
                break
        else:
            shown += stream.flush()
        # The first stop string to be complete ends it.
        ends = {text.find(stop) + len(stop): text.find(stop) for stop in stops if stop in text}
        first = min(ends, default=None)
        expected = text
        if first is not None:
            expected = text[: min(at for end, at in ends.items() if end == first)]
        assert (shown, stream.is_stopped) == (expected, first is not None), (seed, text, stops)


def test_bytes_that_are_no_text_are_withheld_and_shown_at_the_end() -> None:
    """A character that never becomes whole."""
    stream = TextStream(Bytes().decode, ())
    assert [stream.push(token) for token in "é€".encode()[:-1]] == ["", "é", "", ""]
    assert stream.flush() == "\ufffd"


def test_bytes_that_never_become_text_are_not_decoded_again_and_again() -> None:
    """A token that a client biases; and behind them text is text again."""
    most = 0

    def counted(ids: Any) -> Any:
        nonlocal most
        most = max(most, len(ids))
        return ids

    stream = TextStream(lambda ids: Bytes().decode(counted(ids)), ("zz",))
    shown = [stream.push(token) for token in b"ab" + b"\x80" * 3000 + "é!".encode()]
    assert "".join(shown) + stream.flush() == "ab" + "\ufffd" * 3000 + "é!"
    assert most < 100 and not any(shown[4:50]) and any(shown[50:100])


def test_long_stop_strings_take_no_more_than_themselves() -> None:
    """Also where all of a text may be their beginning."""
    stops = ["a" * 20_000, "ab" * 10_000, "a" * 30 + "b"]
    tracemalloc.start()
    try:
        stream, pieces = TextStream(Bytes().decode, stops), list[str]()
        for text in ("a" * 29, "c", "a" * 40, "b", "a"):
            pieces.append("".join(stream.push(token) for token in text.encode()))
            if stream.is_stopped:
                break
        assert pieces == ["", "a" * 29 + "c", "", "a" * 10]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_any_bytes_come_out_as_they_decode_at_once() -> None:
    lot = random.Random(6)
    for _ in range(200):
        tokens = [lot.choice([lot.randrange(256), 0x41, 0xE2]) for _ in range(lot.randint(1, 60))]
        stream = TextStream(Bytes().decode, ())
        shown = "".join(stream.push(token) for token in tokens) + stream.flush()
        assert shown == Bytes().decode(tokens), tokens


def test_a_text_goes_on_from_what_stands_before_it() -> None:
    """Decoders that drop the blank in front of a text keep it where there is text before."""
    words = ["<s>", "a", "bc", "d"]

    def decode(ids: Any) -> str:
        return " ".join(words[i] for i in ids if i)

    for before, blank in (([0], ""), ([], ""), ([0, 1, 2, 3, 1, 2], " "), ([3], " ")):
        stream = TextStream(decode, ("bc d",), before)
        assert [stream.push(token) for token in (3, 2, 1, 2)] == [f"{blank}d", " ", "bc a", " "]
        assert stream.flush() == "bc"
    # Half a character at the end of a prompt is shown with its other half.
    stream = TextStream(Bytes().decode, (), tuple("ä€".encode()[:-1]))
    assert stream.push("€".encode()[-1]) == "€"
    # Where it is the prompt's own character, or another follows, nothing of it is.
    for before in ("ab\ufffd".encode(), "ä€".encode()[:-1]):
        stream = TextStream(Bytes().decode, ("\ufffd",), tuple(before))
        assert [stream.push(token) for token in b"cd"] == ["c", "d"] and not stream.is_stopped
    stream = TextStream(Bytes().decode, (), "€".encode()[:1])
    assert [stream.push(token) for token in "€".encode()[1:] + b"x"] == ["", "€", "x"]


def test_whole_texts_become_tokens_whatever_a_tokenizer_was_saved_with(tmp_path: Path) -> None:
    """Truncation and padding are of training; transformers sets neither where nobody asks."""
    made = words_of(200)
    wanted = [made.encode(text).ids for text in ("w1 w2", " ".join(f"w{i}" for i in range(150)))]
    made.enable_truncation(8)
    made.enable_padding(length=16, pad_id=3)
    made.save(str(tmp_path / "tokenizer.json"))
    own = text_of(tmp_path)
    assert [own.encode(own.decode(ids)) for ids in wanted] == wanted


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_text_of_another_tokenizer_is_refused_not_taken_for_bytes(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"x")
    own = text_of(tmp_path)
    for ask in (own.encode, lambda text: own.chat([{"role": "user", "content": text}])):
        with pytest.raises(RequestError, match=f"{name}.*tokenizer.json.*save_pretrained"):
            ask("a")
    words_of(5).save(str(tmp_path / "tokenizer.json"))
    assert text_of(tmp_path).encode("w1") == [2]


def test_tokens_are_added_as_far_as_the_model_has_rows(tmp_path: Path) -> None:
    """A pad that a file names and no tokenizer has is common; one more than rows ends grammars."""
    words_of(5).save(str(tmp_path / "tokenizer.json"))
    told = {"chat_template": "{{ pad_token }} w1", "pad_token": "[PAD]", "bos_token": "w0"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(told))
    messages = [{"role": "user", "content": ""}]
    for rows, size in ((5, 6), (6, 6), (7, 7), (None, 7)):
        own = text_of(tmp_path, rows)
        assert own.fast.get_vocab_size() == size
        assert own.chat(messages) == ([6, 2] if size == 7 else own.encode("[PAD] w1"))
        assert own.decode([1, 2]) == "w1", "what has a name is special"
    words_of(5, special=40).save(str(tmp_path / "tokenizer.json"))  # ids with a hole
    for rows, size in ((41, 7), (42, 8)):
        assert text_of(tmp_path, rows).fast.get_vocab_size() == size
    words_of(5).save(str(tmp_path / "tokenizer.json"))
    older = {"bos_token": "w2", "eos_token": {"content": "w3", "lstrip": False}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    told = {"chat_template": "{{ bos_token }} {{ eos_token }}", "bos_token": "w0"}
    for more, wanted in (({}, [3, 4]), ({"added_tokens_decoder": {}}, [1])):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(told | more))
        assert text_of(tmp_path, 6).chat(messages) == wanted


def test_thousands_of_added_tokens_are_read_at_once(tmp_path: Path) -> None:
    """Gemma 3 has 6,415, whose two files say the same of them."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizer of a folder")
    made = words_of(5)
    made.add_special_tokens([tokenizers.AddedToken(f"<unused{i}>") for i in range(6415)])
    made.save(str(tmp_path / "tokenizer.json"))
    added = json.loads(made.to_str())["added_tokens"]
    told = {token.pop("id"): {**token, "lstrip": True} for token in added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": told}))
    began = time.process_time()
    assert text_of(tmp_path).encode("w1 <unused6414>")[-1] == 6 + 6414
    assert time.process_time() - began < 3.0  # 0.1 measured, 7 where each is held beside each


def test_json_by_a_tokenizer_of_more_tokens_than_the_model_has_rows() -> None:
    """Gemma 3's text alone has none for the token of an image."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizer of a folder")
    pytest.importorskip("llguidance", reason="the grammars of JSON answers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(["</s>", *alphabet])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["</s>", "<image>"])
    for size in (257, 258, 300):
        engine = SimpleNamespace(tokenizer=made, vocab_size=size, eos_token_ids={0})
        (grammar,) = Grammars(engine).json({"type": "integer"}, 1)
        mask = np.zeros(-(-size // 32), np.int32)
        grammar.bitmask(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        assert sorted(alphabet[i - 1] for i in bits.nonzero()[0]) == [*"-0123456789"]


def words_of(count: int, special: int | None = None) -> Any:
    """A tokenizer of that many words, w0 and on, from 1 on; and a special one of that id."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizer of a folder")
    words = {"<unk>": 0, **{f"w{i}": i + 1 for i in range(count)}}
    words |= {} if special is None else {"<end>": special}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens([] if special is None else ["<end>"])
    return made
