"""Text from outside (logs, command lines, names, reports) as a terminal may show it.

Every line that memtop shows passes `clean`. Without it a program's last line or another user's
command line could move the cursor, rename the window or write to the clipboard.
"""

from __future__ import annotations

import re

LONGEST = 8192
"""Characters kept of one line; a cut is marked with an ellipsis."""

_SEQUENCE = (
    # A command string (window title, clipboard, device control) up to its end. Without an end only
    # its start is removed, so that it hides nothing.
    r"(?:\x1b[PX^_\]]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\r\n]*(?:\x07|\x1b\\|\x9c)"
    # Colours and cursor movements.
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    # Escapes of two or more characters, such as a reset or another character set.
    r"|\x1b[ -/]*[0-~]"
)
# Control characters, marks that reverse the direction of text, and invisible format characters. The
# joiners U+200C and U+200D are part of words.
_INVISIBLE = (
    r"[\x00-\x08\x0e-\x1b\x1f\x7f-\x84\x86-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]"
)
_REMOVED = re.compile(f"{_SEQUENCE}|{_INVISIBLE}")
_LINE_ENDS = re.compile(r"[\n\v\f\r\x1c-\x1e\x85\u2028\u2029]+")
_HALF_PAIRS = re.compile(r"[\ud800-\udfff]")


def clean(text: str) -> str:
    """The text as one line without escape sequences, control characters and bidirectional marks.

    Line ends become a space, tabs four. Bytes that are not UTF-8 become a replacement mark.
    """
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}…"
    if text.isprintable():
        return text
    text = _LINE_ENDS.sub(" ", _REMOVED.sub("", text))
    return _HALF_PAIRS.sub("\ufffd", text.replace("\t", "    "))
