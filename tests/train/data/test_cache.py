"""Tokens on disk: the same documents, built once, in bounded memory."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from memtop.train import BadInputError
from memtop.train.data import open_data
from memtop.train.data.files import cache_folder, fingerprint
from memtop.train.data.rows import open_rows
from memtop.train.data.samples import PromptResponse, RowSamples, RowText, Seq2SeqPairs
from memtop.train.data.tokens import BEGIN, END, ByteTokens, LibraryTokens, TokenStore, token_cache
from tests.train.data.support import at_once, build_tokenizer
from tests.train.launching import printed_by
from tests.train.recipes import pairs, write_rows
from tests.train.support import TINY

BYTES = ByteTokens()
TEXTS = ["hello", "", "größer", "x" * 1000]


class Wide(ByteTokens):
    """Ids beyond 16 bits, no begin."""

    vocabulary = 70_000
    begin = None
    end = 69_999
    identity = "wide"


class Lying(ByteTokens):
    vocabulary = 100
    identity = "lying"


class Counted:
    """Texts that count how often they were read."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts
        self.readings = 0

    def __iter__(self) -> Iterator[str]:
        self.readings += 1
        return iter(self.texts)


def expected(text: str) -> list[int]:
    return [BEGIN, *text.encode(), END]


def test_documents_are_built_once_and_read_back(tmp_path: Path) -> None:
    texts = Counted(TEXTS)
    for _ in range(3):
        store = token_cache(texts, BYTES, tmp_path / "new" / "cache", "key")
        assert [store.document(n).tolist() for n in range(len(store))] == [expected(text) for text in TEXTS]
    assert texts.readings == 1
    assert store.tokens.dtype == np.uint16
    assert store.boundaries.dtype == np.int64
    assert isinstance(store.tokens, np.memmap)
    assert isinstance(store.boundaries, np.memmap)
    assert store.boundaries[0] == 0
    assert store.boundaries[-1] == len(store.tokens)


def test_another_key_or_tokenizer_is_another_cache(tmp_path: Path) -> None:
    texts = Counted(TEXTS)
    token_cache(texts, BYTES, tmp_path, "one")
    token_cache(texts, BYTES, tmp_path, "two")
    store = token_cache(texts, Wide(), tmp_path, "one")
    assert texts.readings == 3
    assert store.tokens.dtype == np.uint32
    assert store.document(0).tolist() == [*b"hello", 69_999]


def test_rows_and_lists_of_ids_are_documents_too(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    rows = open_rows(path, ["text"])
    store = token_cache(RowText(rows, BYTES), BYTES, tmp_path, fingerprint(path))
    assert [store.document(n).tolist() for n in range(len(store))] == [expected("one"), expected("two")]


def test_many_tokens_are_written_in_pieces(tmp_path: Path) -> None:
    texts = [chr(97 + n % 26) * 50_000 for n in range(60)]
    store = token_cache(texts, BYTES, tmp_path, "key")
    assert len(store.tokens) == 60 * 50_002
    assert [store.document(n).tolist() for n in (0, 31, 59)] == [expected(texts[n]) for n in (0, 31, 59)]


def test_a_store_is_pickled_as_its_folder(tmp_path: Path) -> None:
    store = token_cache(TEXTS, BYTES, tmp_path, "key")
    packed = pickle.dumps(store)
    assert len(packed) < 500
    again = pickle.loads(packed)
    assert isinstance(again.tokens, np.memmap)
    assert again.document(2).tolist() == expected("größer")


def test_small_texts_stay_in_memory() -> None:
    documents = [np.array(expected(text)) for text in TEXTS]
    store = TokenStore.from_arrays(documents, BYTES.vocabulary)
    for each in (store, pickle.loads(pickle.dumps(store))):
        assert [each.document(n).tolist() for n in range(len(each))] == [expected(text) for text in TEXTS]
        assert each.tokens.dtype == np.uint16
    assert len(TokenStore.from_arrays([], 10)) == 0


def test_ids_that_do_not_fit_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="a token id 257 is outside the tokenizer's vocabulary of 100"):
        token_cache(["a"], Lying(), tmp_path, "key")
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_damaged_cache_is_reported(tmp_path: Path) -> None:
    token_cache(TEXTS, BYTES, tmp_path, "key")
    (folder,) = tmp_path.glob("*.tokens")
    (folder / "tokens.npy").write_bytes(b"no")
    with pytest.raises(BadInputError, match="delete the folder to build it again"):
        token_cache(TEXTS, BYTES, tmp_path, "key")


BUILDING = """
import json, sys
from pathlib import Path
import numpy as np
from tests.train.data.test_cache import BYTES, Counted, token_cache
print("ready", flush=True)
sys.stdin.readline()
texts = Counted(["abc" * 1000] * 2000)
store = token_cache(texts, BYTES, Path(sys.argv[1]), "key")
print(json.dumps([texts.readings, len(store), int(store.tokens.sum(dtype=np.int64))]))
"""


def test_one_of_two_processes_builds(tmp_path: Path) -> None:
    found = [json.loads(lines[-1]) for lines in at_once(BUILDING, str(tmp_path))]
    assert sorted(readings for readings, *_ in found) == [0, 1]
    assert [rest for _, *rest in found] == [[2000, 2000 * (1000 * (97 + 98 + 99) + BEGIN + END)]] * 2


_MEASURE = """
import json, resource, sys
from pathlib import Path
from memtop.train.data.tokens import ByteTokens, token_cache
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
token_cache(["a" * 10_000] * 200, ByteTokens(), Path(sys.argv[1]), "small")
before = peak()
store = token_cache(("a" * 10_000 for _ in range(5000)), ByteTokens(), Path(sys.argv[1]), "large")
print(json.dumps({"growth": peak() - before, "tokens": len(store.tokens)}))
"""


def test_building_takes_bounded_memory(tmp_path: Path) -> None:
    found = printed_by("-c", _MEASURE, str(tmp_path))
    assert found["tokens"] == 5000 * 10_002
    # 100 MB on disk, 400 MB as a list of ids.
    assert found["growth"] < 15e6


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_folder_is_told_what_to_set() -> None:
    with pytest.raises(BadInputError, match="XDG_CACHE_HOME: not set, and this user has no home folder"):
        cache_folder()


def test_pairs_are_tokenized_once_for_all_epochs_and_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls: list[str] = []
    encode = ByteTokens.encode
    monkeypatch.setattr(ByteTokens, "encode", lambda tokens, text: calls.append(text) or encode(tokens, text))
    path = write_rows(tmp_path / "train.jsonl", pairs(20))
    for task, kind in (("sft", PromptResponse), ("seq2seq", Seq2SeqPairs)):
        for seq_len in (24, 64):
            settings = msgspec.structs.replace(TINY, task=task, seq_len=seq_len, data={"train": str(path)})
            data = open_data(settings, BYTES).train
            assert isinstance(data, RowSamples)
            direct = kind(open_rows(path, ["prompt", "response"]), BYTES, seq_len)
            calls.clear()
            found = [data[index, 0] for index in range(20) for epoch in range(2)]
            assert calls == [], "a sample was tokenized again"
            for index in range(20):
                for cached, one in zip(found[2 * index], direct[index], strict=True):
                    assert torch.equal(cached, one)
    # One cache for each kind of pair, whatever T is.
    assert len(list((tmp_path / "cache").rglob("*.tokens"))) == 2


def test_another_chat_template_gives_other_tokens(tmp_path: Path) -> None:
    one, other = (LibraryTokens(str(build_tokenizer(tmp_path / name, chat=True))) for name in ("a", "b"))
    assert one.identity == other.identity
    settings = tmp_path / "b" / "chat_template.jinja"
    settings.write_text(settings.read_text() + " ")
    assert LibraryTokens(str(tmp_path / "b")).identity != one.identity
