"""The tokens that a model gets, and which of them it is trained on, decoded to text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from memtop.train.data.rows import Rows, open_rows
from memtop.train.data.samples import PromptResponse, RowText, Seq2SeqPairs, collate
from memtop.train.data.tokens import BEGIN, END, PAD, ByteTokens, LibraryTokens, Tokens
from memtop.train.objective import IGNORED
from tests.train.data.support import build_tokenizer

BYTES: Tokens = ByteTokens()


def rows_of(folder: Path, *pairs: tuple[str, str]) -> Rows:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in pairs))
    return open_rows(path, ["prompt", "response"])


def text_of(ids: torch.Tensor) -> str:
    """Bytes as text; ^ is begin, $ end, ~ padding, _ a label that does not count."""
    signs = {BEGIN: "^", END: "$", PAD: "~", IGNORED: "_"}
    return "".join(signs.get(number) or chr(number) for number in ids.tolist())


@pytest.mark.parametrize(
    ("seq_len", "expected", "labels"),
    [
        (100, "^promptanswer$", "_______answer$"),
        (14, "^promptanswer$", "_______answer$"),
        # The answer is cut at its end and loses the end token.
        (13, "^promptanswer", "_______answer"),
        (10, "^promptans", "_______ans"),
        # The answer keeps a quarter of T; the prompt is cut at its beginning.
        (8, "^romptan", "______an"),
        (4, "^pta", "___a"),
        (2, "^a", "_a"),
    ],
)
def test_only_the_response_is_trained_on(tmp_path: Path, seq_len: int, expected: str, labels: str) -> None:
    samples = PromptResponse(rows_of(tmp_path, ("prompt", "answer")), BYTES, seq_len)
    ids, learnt = samples[0]
    assert (text_of(ids), text_of(learnt)) == (expected, labels)
    assert ids.dtype == learnt.dtype == torch.int64


def test_a_short_answer_to_a_long_prompt_is_kept_whole(tmp_path: Path) -> None:
    ids, labels = PromptResponse(rows_of(tmp_path, ("x" * 50, "yes")), BYTES, 20)[0]
    assert text_of(ids) == "^" + "x" * 15 + "yes$"
    assert text_of(labels) == "_" * 16 + "yes$"


def test_empty_texts(tmp_path: Path) -> None:
    samples = PromptResponse(rows_of(tmp_path, ("", "b"), ("a", "")), BYTES, 8)
    assert [text_of(samples[n][0]) for n in range(2)] == ["^b$", "^a$"]
    assert [text_of(samples[n][1]) for n in range(2)] == ["_b$", "__$"]


def test_a_chat_templates_frame_belongs_to_the_prompt(tmp_path: Path) -> None:
    tokens = LibraryTokens(str(build_tokenizer(tmp_path / "tokenizer", chat=True, begin=True)))
    ids, labels = PromptResponse(rows_of(tmp_path, ("why?", "so.")), tokens, 100)[0]
    opening = tokens.encode("<user>why?\n<assistant>")
    answer = [*tokens.encode("so."), tokens.end]
    # The template begins the text; there is no second <s>.
    assert ids.tolist() == opening + answer
    assert labels.tolist() == [IGNORED] * len(opening) + answer


def test_a_tokenizer_without_begin(tmp_path: Path) -> None:
    tokens = LibraryTokens(str(build_tokenizer(tmp_path / "tokenizer")))
    ids, labels = PromptResponse(rows_of(tmp_path, ("abcdef", "xyz")), tokens, 8)[0]
    assert ids.tolist() == tokens.encode("abcdefxy")
    assert labels.tolist() == [IGNORED] * 6 + tokens.encode("xy")
    ids, _ = PromptResponse(rows_of(tmp_path, ("abcdef", "xyz")), tokens, 4)[0]
    assert ids.tolist() == tokens.encode("defx")


def test_other_column_names(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n')
    rows = open_rows(path, {"prompt": "question", "response": "answer"})
    assert text_of(PromptResponse(rows, BYTES, 9, ("question", "answer"))[0][0]) == "^qa$"


@pytest.mark.parametrize(
    ("seq_len", "inputs", "labels"), [(9, "prompt$", "answer$"), (7, "prompt$", "answer$"), (5, "prom$", "answ$")]
)
def test_both_sides_of_a_seq2seq_pair_end(tmp_path: Path, seq_len: int, inputs: str, labels: str) -> None:
    found = Seq2SeqPairs(rows_of(tmp_path, ("prompt", "answer")), BYTES, seq_len)[0]
    assert tuple(map(text_of, found)) == (inputs, labels)


def test_cuts_are_counted(tmp_path: Path) -> None:
    # 1 + 3 + 4 + 1 tokens, and 1 + 3 + 14 + 1 of which 9 do not fit.
    rows = rows_of(tmp_path, *[("abc", "defg" if n % 4 else "defg" + "x" * 10) for n in range(8)])
    assert PromptResponse(rows, BYTES, 10).cut_report() == {
        "examined": 8,
        "cut": 2,
        "dropped_tokens_fraction": pytest.approx(2 * 9 / (6 * 9 + 2 * 19)),
    }
    assert PromptResponse(rows, BYTES, 100).cut_report() == {"examined": 8, "cut": 0, "dropped_tokens_fraction": 0.0}
    # 3 + 1 and 14 + 1 tokens, of which 5 do not fit.
    assert Seq2SeqPairs(rows, BYTES, 10).cut_report()["dropped_tokens_fraction"] == pytest.approx(2 * 5 / (6 * 9 + 2 * 19))


def test_a_report_examines_a_fixed_subset_all_over_the_file(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, *[("p", "r" * (50 if n >= 5000 else 1)) for n in range(10_000)])
    report = PromptResponse(rows, BYTES, 20).cut_report()
    assert report == PromptResponse(rows, BYTES, 20).cut_report()
    assert report["examined"] == 512
    assert report["cut"] == pytest.approx(256, abs=32)
    assert PromptResponse(rows, BYTES, 20).cut_report(sample_count=10)["examined"] == 10


def test_batches_are_padded_and_masked_by_length(tmp_path: Path) -> None:
    samples = PromptResponse(rows_of(tmp_path, ("ab", "cd"), ("a", "b")), BYTES, 16)
    batch = collate([samples[0], samples[1]], pad=END)
    assert [text_of(row) for row in batch["input_ids"]] == ["^abcd$", "^ab$$$"]
    assert [text_of(row) for row in batch["labels"]] == ["___cd$", "__b$__"]
    assert batch["attention_mask"].tolist() == [[1] * 6, [1] * 4 + [0] * 2]


def test_batches_of_pairs_have_two_lengths(tmp_path: Path) -> None:
    samples = Seq2SeqPairs(rows_of(tmp_path, ("a", "bcd"), ("ef", "g")), BYTES, 16)
    batch = collate([samples[0], samples[1]], pad=PAD)
    assert [text_of(row) for row in batch["input_ids"]] == ["a$~", "ef$"]
    assert [text_of(row) for row in batch["labels"]] == ["bcd$", "g$__"]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_a_data_loader_reads_pairs_in_workers(tmp_path: Path) -> None:
    pairs = [(f"prompt {n}", f"answer {n}") for n in range(20)]
    samples = PromptResponse(rows_of(tmp_path, *pairs), BYTES, 64)
    samples[3]
    loader = torch.utils.data.DataLoader(samples, batch_size=1, num_workers=2, collate_fn=lambda found: found[0])
    assert [text_of(ids) for ids, _ in loader] == [f"^{prompt}{response}$" for prompt, response in pairs]


def test_row_text_can_be_read_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\n")
    texts = RowText(open_rows(path, ["text"]), BYTES)
    assert len(texts) == 2
    for _ in range(2):
        assert list(texts) == [list(b"one"), list(b"two")]
