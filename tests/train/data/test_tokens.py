"""Tokenizers: bytes, and a small real one of the library."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from memtop.train import BadInputError
from memtop.train.data.tokens import BEGIN, END, PAD, VOCABULARY, ByteTokens, LibraryTokens, Tokens, load_tokens
from tests.train.data.support import build_tokenizer


def test_bytes_are_their_own_tokens() -> None:
    tokens: Tokens = load_tokens("bytes", "/some/model")
    assert (tokens.begin, tokens.end, tokens.pad, tokens.vocabulary) == (BEGIN, END, PAD, VOCABULARY)
    assert bytes(tokens.encode("größer\n")).decode() == "größer\n"
    assert tokens.chat("a", "b") is None
    assert max(tokens.encode("\ud83d")) < 256, "half a surrogate pair, which JSON can contain"


def test_the_models_own_tokenizer_is_the_default(tmp_path: Path) -> None:
    path = build_tokenizer(tmp_path / "model")
    assert isinstance(load_tokens(None, str(path)), LibraryTokens)
    assert isinstance(load_tokens("", None), ByteTokens)


def test_a_tokenizer_from_a_folder(tmp_path: Path) -> None:
    tokens: Tokens = load_tokens(str(build_tokenizer(tmp_path / "a")))
    assert tokens.encode("ab") == [tokens.encode("a")[0], tokens.encode("b")[0]]
    assert (tokens.begin, tokens.end, tokens.pad, tokens.vocabulary) == (None, 1, 2, 100)
    assert pickle.loads(pickle.dumps(tokens)).encode("ab") == tokens.encode("ab")


def test_begin_is_what_the_tokenizer_adds(tmp_path: Path) -> None:
    tokens = LibraryTokens(str(build_tokenizer(tmp_path / "a", begin=True)))
    assert tokens.begin == 0
    assert 0 not in tokens.encode("ab")


def test_padding_falls_back_to_the_end(tmp_path: Path) -> None:
    tokens = LibraryTokens(str(build_tokenizer(tmp_path / "a", pad=False)))
    assert tokens.pad == tokens.end == 1


def test_identity_depends_on_the_rules_not_on_the_path(tmp_path: Path) -> None:
    one = LibraryTokens(str(build_tokenizer(tmp_path / "a")))
    same = LibraryTokens(str(build_tokenizer(tmp_path / "b")))
    other = LibraryTokens(str(build_tokenizer(tmp_path / "c", begin=True)))
    assert one.identity == same.identity != other.identity


def test_a_chat_template_frames_both_parts(tmp_path: Path) -> None:
    tokens = LibraryTokens(str(build_tokenizer(tmp_path / "a", chat=True)))
    dialogue = tokens.chat("why", "so")
    assert dialogue is not None
    opening, answer = dialogue
    # The template's line break after </s> is not trained on.
    assert answer == [*tokens.encode("so"), tokens.end]
    assert opening == tokens.encode("<user>why\n<assistant>")


def with_template(folder: Path, template: str) -> LibraryTokens:
    """The test tokenizer with another chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build_tokenizer(folder / "a"))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder / "b")
    return LibraryTokens(str(folder / "b"))


def test_a_template_that_stores_answers_differently(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}[think]{% endif %}"
    tokens = with_template(tmp_path, template)
    assert tokens.chat("why", "so") == (tokens.encode("why[think]"), [*tokens.encode("so"), tokens.end])


def test_a_failing_template_is_reported(tmp_path: Path) -> None:
    tokens = with_template(tmp_path, "{{ raise_exception('system first') }}")
    with pytest.raises(BadInputError, match=r"chat template failed: TemplateError: system first"):
        tokens.chat("why", "so")


def test_unreadable_tokenizers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"tokenizer /nowhere/model: no such folder; give a folder"):
        load_tokens("/nowhere/model")
    with pytest.raises(BadInputError, match=rf"tokenizer {tmp_path}: cannot be loaded: .*tokenizer\.json") as caught:
        load_tokens(str(tmp_path))
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(BadInputError, match=r"instantiate the backend tokenizer; the folder needs tokenizer\.json or "):
        load_tokens(str(tmp_path))
    # The tests run offline, so a hub name is searched only in the local cache.
    with pytest.raises(
        BadInputError, match=r"tokenizer memtop-test/absent: cannot be loaded: .*download it while online"
    ) as caught:
        load_tokens("memtop-test/absent")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build_tokenizer(tmp_path / "a"))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "b")
    with pytest.raises(BadInputError, match="has no end token"):
        load_tokens(str(tmp_path / "b"))
