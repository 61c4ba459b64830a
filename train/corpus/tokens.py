"""Text to token ids: bytes, which need nothing, or a tokenizer of the transformers library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from memtop.train.corpus.once import digest
from memtop.train.errors import BadInputError

# Byte-level tokens: 0-255 are bytes.
BEGIN, END, PAD = 256, 257, 258
VOCABULARY = 259


class Tokens(Protocol):
    """A vocabulary and the way into it."""

    @property
    def vocabulary(self) -> int:
        """All ids are below it."""
        ...

    @property
    def begin(self) -> int | None:
        """The id that a text begins with; None where the tokenizer has no such habit."""
        ...

    @property
    def end(self) -> int: ...

    @property
    def pad(self) -> int: ...

    @property
    def identity(self) -> str:
        """Changes when the same text would give other ids: part of the name of cached tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of the text alone, without begin and end."""
        ...

    def chat(self, prompt: str, response: str) -> tuple[list[int], list[int]] | None:
        """Ids of a dialogue up to the response and from there to its end; None without a chat template."""
        ...

    def save(self, folder: Path) -> None:
        """Write down beside an exported model how text becomes ids."""
        ...


class ByteTokens:
    """UTF-8 bytes as ids 0-255; 256 begins, 257 ends, 258 pads."""

    vocabulary = VOCABULARY
    begin: int | None = BEGIN
    end = END
    pad = PAD
    identity = "bytes"

    def encode(self, text: str) -> list[int]:
        # JSON may carry half a surrogate pair; it is text all the same.
        return list(text.encode("utf-8", "surrogatepass"))

    def chat(self, prompt: str, response: str) -> tuple[list[int], list[int]] | None:
        return None

    def save(self, folder: Path) -> None:
        meaning = {"kind": "bytes", "vocabulary": VOCABULARY, "bytes": [0, 255], "begin": BEGIN, "end": END, "pad": PAD}
        text = "ids 0-255 are the bytes of the text in UTF-8; a document is begin, its bytes, end; pad fills up at the end"
        (folder / "tokenizer_bytes.json").write_text(json.dumps({**meaning, "meaning": text}, indent=1) + "\n")


class LibraryTokens:
    """The tokenizer in a local folder, or of a hub name that is already in the local cache."""

    def __init__(self, path: str) -> None:
        tokenizer = _load(path)
        self._tokenizer = tokenizer
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        if end is None:
            raise BadInputError(f"tokenizer {path}: has no end token; set eos_token in its tokenizer_config.json")
        self.end: int = end
        self.pad: int = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        known = tokenizer.get_vocab()
        # Some vocabularies have holes: their length is not above all ids.
        self.vocabulary: int = max(known.values()) + 1
        # Many name a begin token without ever using it; what the model has seen is what the tokenizer does by itself.
        habit = tokenizer("a", verbose=False)["input_ids"]
        self.begin: int | None = habit[0] if habit and habit[0] == tokenizer.bos_token_id else None
        self.identity = digest(repr(sorted(known.items())), _rules(tokenizer), str(self.begin), str(end))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def chat(self, prompt: str, response: str) -> tuple[list[int], list[int]] | None:
        if not self._tokenizer.chat_template:
            return None
        question = [{"role": "user", "content": prompt}]
        opening = self._render(question, add_generation_prompt=True)
        whole = self._render([*question, {"role": "assistant", "content": response}])
        # Some templates open a response in another way than they store it: then only what the model must say is left.
        answer = self.encode(whole.removeprefix(opening) if whole.startswith(opening) else response)
        if self.end in answer:
            # Templates go on with a line break after the end; nobody asks for it.
            answer = answer[: len(answer) - answer[::-1].index(self.end)]
        else:
            answer.append(self.end)
        return self.encode(opening), answer

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))

    def _render(self, messages: list[dict[str, str]], **options: Any) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        # A template is a program of its author's: it may fail in any way.
        except Exception as error:  # noqa: BLE001
            name = self._tokenizer.name_or_path
            raise BadInputError(f"tokenizer {name}: its chat template fails: {type(error).__name__}: {error}") from None
        return text


def load_tokens(name: str | None, model_path: str | None = None) -> Tokens:
    """ "bytes", or a tokenizer by folder or hub name; by default the model's own, and bytes for a model without a path."""
    name = name or model_path or "bytes"
    return ByteTokens() if name == "bytes" else LibraryTokens(name)


def _load(path: str) -> Any:
    # A few seconds that runs on bytes need not spend.
    from transformers import AutoTokenizer

    expanded = str(Path(path).expanduser())
    looks_local = path.startswith(("/", ".", "~")) or Path(expanded).exists()
    if looks_local and not Path(expanded).is_dir():
        raise BadInputError(f"tokenizer {path}: no such folder; name a folder with tokenizer.json, a hub name or bytes")
    try:
        return AutoTokenizer.from_pretrained(expanded)
    # Broken files come as any kind of error from three libraries.
    except Exception as error:  # noqa: BLE001
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        help_ = (
            "the folder needs tokenizer.json or another tokenizer file"
            if looks_local
            else "download it while online (hf download NAME), or name a local folder or bytes"
        )
        raise BadInputError(f"tokenizer {path}: cannot be loaded: {reason}; {help_} (data.tokenizer)") from None


def _rules(tokenizer: Any) -> str:
    """How text is cut, as far as the tokenizer can say it: fast ones can in full."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return str(backend.to_str()) if backend is not None else f"{type(tokenizer).__name__} {tokenizer.name_or_path}"
