"""A log's bytes as UTF-8, and whether bytes are a log at all."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator

# What no program prints: control characters but for those of terminals (bell, backspace, tabs, line and page ends, character
# sets, escape). Not NUL: a crash leaves blocks of them in a file.
_UNPRINTED = bytes({*range(0x20), 0x7F} - {0x00, *range(0x07, 0x10), 0x1B})
_MOST_UNPRINTED, _LEAST_COUNT = 0.03, 32
_COMPRESSED = ((b"\x1f\x8b", "gzip", "zcat"), (b"\x28\xb5\x2f\xfd", "zstd", "zstdcat"), (b"\xfd7zXZ", "xz", "xzcat"))


def why_no_text(start: bytes) -> str | None:
    """Why a file that begins with these bytes is no log, with what to do; None where it may be one, in whatever encoding.

    In machine code, compressed data and tensors every tenth to twentieth byte is a control character that nobody prints.
    """
    for mark, name, reader in _COMPRESSED:
        if start.startswith(mark):
            return f"is compressed ({name}); give its text: {reader} FILE | memtop diagnose -"
    text = b"".join(as_utf8([start])).replace(b"\0", b"")
    unprinted = len(text) - len(text.translate(None, _UNPRINTED))
    if unprinted > max(_LEAST_COUNT, _MOST_UNPRINTED * len(text)):
        return "is a binary file; give what the program printed, as text"
    return None


def as_utf8(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """PowerShell and some editors write logs in UTF-16: seen by the mark at the beginning, or by every second byte being 0."""
    stream = iter(chunks)
    start = b""
    for chunk in stream:
        start += chunk
        if len(start) >= 512:
            break
    encoding = _utf16(start[:512])
    if encoding is None:
        yield start
        yield from stream
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    for chunk in itertools.chain((start,), stream):
        yield decoder.decode(chunk).encode("utf-8", "replace")
    yield decoder.decode(b"", True).encode("utf-8", "replace")


def _utf16(start: bytes) -> str | None:
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    half = len(start) // 2
    if half >= 8:
        for encoding, zeros, others in (("utf-16-le", start[1::2], start[::2]), ("utf-16-be", start[::2], start[1::2])):
            if zeros.count(0) > half * 0.7 and others.count(0) < half * 0.1:
                return encoding
    return None
