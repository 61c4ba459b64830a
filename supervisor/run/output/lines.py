"""One line of a program's output, read as numbers of a training: step, total, loss, learning rate.

This file knows how programs write. Whether a counter is the step of the training is decided by
`learning.py`, which sees several lines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import msgspec

from memtop.supervisor.clean import clean

PATTERN_GROUPS = ("step", "total", "loss", "lr", "epoch")
"""What a user's own expression may find in a line."""
_LONGEST, _LONGEST_RAW = 600, 2000
_RANK = re.compile(r"\[(?:rank ?|default|trainer|worker)(\d+)\]: ?")
"""What torchrun, and torch's own messages, write before a line of a rank."""
_FILL = re.compile(r"(?<=[█#━])[█#━]+")
_NUMBER = r"[+-]?(?:(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?|[+-]?(?:nan|inf(?:inity)?)\b"
_NAME = r"(?<![\w/.@-])([a-z][\w./@-]*(?: [a-z][\w/]*){0,2})"
_NAMED = re.compile(
    rf"{_NAME}(?:['\"\])]*\s*(?P<unit>\((?:ms|s)\))?\s*(?:[:=]+|->)\s*|\s+)[\[({{'\"]*(?:tensor\()?\s*"
    rf"({_NUMBER})(?!\.\d|[-/:]\d|\d)(?:\s*(?:/|of)\s*(\d[\d,]*)(?![\d./:-]*[/:-]\d))?"
    rf"|{_NAME}['\"]?(?:\s*[:=]\s*|\s+)[\[({{'\"]*(\d[\d,]*)\s*/\s*(\d[\d,]*)(?![\d./])"
)
_EPOCH_AND_STEP = re.compile(r"\[(\d+), ?(\d+)\](?=[ :|]*(?:[a-z]+[ _])?loss\b)")
"""`[1,  2000] loss: 2.2`."""
_EPOCH_BEFORE = re.compile(r"(?:\[(\d+)(?:/(\d+))?\]|\btrain(?:ing)?:? (\d+)) ?(?=\[ ?\d+/\d+)")
"""The epoch before the step: `Train: [0/300][10/1251]`, `Train: 2 [55/100 (56%)]`, `[1][50/73]`."""
_PAIR = re.compile(r"(?<![\w.,:/-])(\d[\d,]*)\s*/\s*(\d[\d,]*)(?![\d./,]|\s*/)")
_STEP_UNIT = r"(?:it|iter|step|batch|ba|update)"
_RATE = re.compile(rf"(?<![\d.])(\d+(?:\.\d+)?|\?)\s*(?:({_STEP_UNIT}(?:e?s)?)/s(?:ec)?\b|(ms|s)/{_STEP_UNIT}\b)")
_TOKENS = re.compile(r"(?<![\d.,])(\d[\d,]*(?:\.\d+)?)\s*(k|m)?\s*tok(?:en)?s?/s")
_ENDLESS = re.compile(rf"(?<![\w.,/])(\d[\d,]*) ?{_STEP_UNIT}(?:e?s)? \[[\d:]+,")
"""`100it [00:10, 9.8it/s]`: a bar of an unknown length."""
_BAR_NAME = re.compile(r"(.{0,60}?)(?:\d+%\||\d[\d,]* ?[a-z]+ \[[\d:]+,)")
_VALUE = re.compile(r"[\d.]+(?:e-?\d+)?|nan|inf")
_BAR = re.compile(r"%\||━|\[[\d:]+<|\[\d+:[\d:]+,|\d\s*\[[=>.\-]*[=>][=>.\-]*\]")
_PER_UNIT = re.compile(r"\s*(ms|s|sec|seconds)\b(?!/)")
_EVALUATES = re.compile(r"\b(?:eval|evaluate|evaluation|evaluating|valid|validate|validation|validating|val|test|testing)\b")
_OWN = re.compile(r"\s*memtop:((?:\s+[a-z_]+=\S+)+)\s*$")

_LOSSES = frozenset({"loss", "losses", "nll", "cost", "objective"})
_NO_LOSS = frozenset({"scale", "scaler", "weight", "coef", "fn", "function", "best", "min", "lowest", "delta", "std", "kernel"})
_EVALUATED = frozenset({"val", "eval", "valid", "validation", "evaluation", "test", "dev"})
_STEPS = {"update": 0, "updates": 0, "step": 1, "steps": 1, "iteration": 2, "iterations": 2, "iter": 2, "iters": 2, "it": 2}
_STEPS |= {"batch": 3, "batches": 3, "minibatch": 3}
_NO_STEP = frozenset(
    {
        *("per", "num", "max", "total", "size", "time", "save", "saved", "saving", "every", "warmup", "log", "logging"),
        *("accum", "accumulation", "grad", "gradient", "number", "count", "world", "micro", "eval", "local", "left"),
        *("remaining", "loading", "compiling", "decay", "interval", "patience"),
    }
)
_DECLARES = frozenset({"max", "total", "num"})
_DECLARED_STEPS = _DECLARES - {"num"} | {"train", "training"}
"""In the name of an option. `--num-steps` may be the length of something else."""
_DECLARED_EPOCHS = _DECLARED_STEPS | {"num", "n", "nb", "trainer"}
_OPTION = re.compile(r"-{0,2}([a-z][\w.-]*)=(\d+)|--([a-z][\w.-]*) (\d+)(?![^ ])", re.IGNORECASE)
_NO_DECLARATION = _NO_STEP - _DECLARES
_NO_SECONDS = frozenset({"epoch", "train", "training", "total", "eval", "eta", "remaining", "wall", "run"})
_COUNTERS = frozenset({"num_updates", "iter_num", "step_num", "num_steps_done", "micro_step"})
_SECONDS = frozenset({"time", "dt", "duration", "ms", "sec"})
_FILLERS = frozenset({"is", "was", "at", "now", "current", "value"})


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers in one line. None: the line does not have it."""

    shape: str
    """The same for all lines that a program writes in one place: `iter loss`."""
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    """May be nan or infinite."""
    learning_rate: float | None = None
    epoch: float | None = None
    epochs: int | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    is_bar: bool = False
    declared: int | None = None
    """The line is no step but names how many there will be: `max_iters = 100`."""
    declared_epochs: int | None = None
    evaluated: bool = False
    """The line is about an evaluation."""
    trained: bool = False
    """It has the loss of the training too: `train_loss 2.1, val_loss 2.3`."""
    certain: bool = False
    """The program, or its user, says what the numbers are."""


def read_line(text: str, pattern: re.Pattern[str] | None = None) -> Line | None:
    """The line's numbers; None if it has none of a training.

    `pattern`: the user's own expression for lines of this program.
    """
    text = text[: 4 * _LONGEST_RAW]
    if "\x1b" in text or "\x9b" in text:
        text = clean(text)
    text = text[:_LONGEST_RAW]
    if pattern is not None and (match := pattern.search(text)):
        return _certain("the pattern in MEMTOP_STEP", match.groupdict())
    own = _OWN.match(text)
    if own is not None:
        return _certain("memtop: step=N", dict(word.split("=", 1) for word in own[1].split()))
    # Without long gaps and the filled part of bars, no expression below has to look far.
    text = " ".join(_FILL.sub("", text.lower()).split())[:_LONGEST]
    rank = _RANK.match(text)
    if rank is None:
        return _read(text)
    # The lines of each rank have a shape of their own, so that the losses of one rank count.
    line = _read(text[rank.end() :])
    return None if line is None else msgspec.structs.replace(line, shape=f"{rank[0].strip()} {line.shape}")


def declared_by(command: Sequence[str]) -> tuple[int | None, int | None]:
    """How many steps and epochs there will be, by the options of the program: `--max-steps 500`,
    `--epochs=90`. Steps take precedence."""
    steps = epochs = None
    for index, word in enumerate(command):
        following = command[index + 1] if index + 1 < len(command) and "=" not in word else ""
        option = _OPTION.fullmatch(f"{word} {following}" if following else word)
        if option is None:
            continue
        *words, last = re.split(r"[_.-]+", (option[1] or option[3]).lower())
        value = whole(option[2] or option[4]) or None
        if last == "epochs" and _DECLARED_EPOCHS.issuperset(words):
            epochs = value
        elif _STEPS.get(last, 9) <= 2 and last.endswith("s") and words and _DECLARED_EPOCHS.issuperset(words):
            steps = value if _DECLARED_STEPS.intersection(words) else steps
    return steps, None if steps is not None else epochs


def _certain(shape: str, values: Mapping[str, str | None]) -> Line | None:
    """The line by values with names."""
    step = whole(values.get("step"))
    loss = number(values.get("loss"))
    if step is None and loss is None:
        return None
    return Line(
        shape=shape,
        step=step,
        total=whole(values.get("total")),
        loss=loss,
        learning_rate=finite(values.get("lr") or values.get("learning_rate")),
        epoch=finite(values.get("epoch")),
        certain=True,
    )


def _read(text: str) -> Line | None:
    found = _Found(text)
    is_bar = _BAR.search(text) is not None
    rate = _RATE.search(text)
    found.take_pair(text, wanted=found.loss is not None or (is_bar and rate is not None))
    if found.loss is None and found.step is None and (found.declared or found.declared_epochs):
        return Line(shape="declared", declared=found.declared, declared_epochs=found.declared_epochs)
    if found.total is None and found.step is not None and found.declared is not None and found.step <= found.declared:
        found.total = found.declared
    if found.summary or (found.loss is None and found.step is None and found.epoch is None):
        return None
    before = text if found.loss_at is None else text[: found.loss_at]
    named = _EVALUATES.search(before) is not None
    evaluated = (found.evaluated and not (is_bar and found.loss is not None)) or named
    words = [found.step_name or ("n/m" if found.step is not None else ""), "epoch" if found.epoch is not None else ""]
    words.append(found.loss_name)
    if is_bar:
        # Bars look alike: they differ in where they end, and in the words before them.
        name = _BAR_NAME.match(text)
        words += [_VALUE.sub("#", name[1]).strip()] if name is not None else []
        words.append(f"bar of {found.total}")
    if evaluated:
        words.append("and evaluation")
    return Line(
        shape=" ".join(word for word in words if word),
        step=found.step,
        total=found.total,
        loss=found.loss,
        learning_rate=found.learning_rate,
        epoch=found.epoch,
        epochs=found.epochs,
        step_seconds=_seconds(rate) or found.seconds,
        tokens_per_second=_tokens_per_second(text),
        is_bar=is_bar,
        evaluated=evaluated,
        trained=evaluated and not named and found.loss is not None,
    )


class _Found:
    """What the names in a line say."""

    def __init__(self, text: str) -> None:
        self.step: int | None = None
        self.total: int | None = None
        self.step_name = ""
        self.loss: float | None = None
        self.loss_name = ""
        self.loss_at: int | None = None
        self.learning_rate: float | None = None
        self.epoch: float | None = None
        self.epochs: int | None = None
        self.seconds: float | None = None
        self.evaluated = False
        self.summary = False
        self.declared: int | None = None
        self.declared_epochs: int | None = None
        self._step_rank, self._loss_rank = 9.0, 9
        self._spans: list[tuple[int, int]] = []
        for match in _NAMED.finditer(text):
            name, value, of = (match[1], match[3], match[4]) if match[1] else (match[5], match[6], match[7])
            tokens = [token for token in re.split(r"[\s_/.@-]+", name) if token]
            while len(tokens) > 1 and tokens[-1] in _FILLERS:
                tokens.pop()
            if tokens:
                self._take(text, match, tokens, value, of)

    def _take(self, text: str, match: re.Match[str], tokens: list[str], value: str, of: str | None) -> None:
        last = tokens[-1]
        if last == "runtime":
            self.summary = True
        elif any(token in _LOSSES or token.endswith("loss") for token in tokens) and not _NO_LOSS.intersection(tokens):
            self._take_loss(match, tokens, value)
        elif last in ("epoch", "ep") and not _NO_STEP.intersection(tokens):
            self.epoch, self.epochs = finite(value), whole(of)
            self._spans.append(match.span())
        elif (last in _STEPS and not _NO_STEP.intersection(tokens)) or "_".join(tokens[-2:]) in _COUNTERS:
            rank = _STEPS.get(last, 0) - (0.5 if "global" in tokens else 0)
            behind = text[match.end() : match.end() + 1]
            if rank < self._step_rank and (count := whole(value)) is not None and not behind.isalnum() and behind != "%":
                self.step, self.total, self.step_name, self._step_rank = count, whole(of), "_".join(tokens[-2:]), rank
                self.evaluated = self.evaluated or bool(_EVALUATED.intersection(tokens))
            self._spans.append(match.span())
        elif _STEPS.get(last, 9) <= 2 and _DECLARES.intersection(tokens) and not _NO_DECLARATION.intersection(tokens):
            self.declared = whole(value) or None
        elif last in ("epoch", "epochs") and _DECLARES.intersection(tokens) and not _NO_DECLARATION.intersection(tokens):
            self.declared_epochs = whole(value) or None
        elif (last == "lr" or tokens[-2:] == ["learning", "rate"] or tokens[0] == "lr") and self.learning_rate is None:
            self.learning_rate = finite(value)
        elif last in _SECONDS and not _NO_SECONDS.intersection(tokens):
            unit = _PER_UNIT.match(text, match.end())
            words = match["unit"] or (unit[1] if unit else "")
            if words and (seconds := finite(value)) is not None and seconds > 0:
                self.seconds = seconds / 1000 if "ms" in words else seconds

    def _take_loss(self, match: re.Match[str], tokens: list[str], value: str) -> None:
        if _EVALUATED.intersection(tokens):
            self.evaluated = True
            return
        if tokens[-1] in _LOSSES and len(tokens) == 1:
            rank = 0
        elif {"train", "training"}.intersection(tokens):
            rank = 2 if tokens[-1] == "epoch" else 1
        else:
            rank = 3 if "total" in tokens else 4
        if rank < self._loss_rank and (loss := number(value)) is not None:
            self.loss, self.loss_name, self._loss_rank = loss, "_".join(tokens), rank
            self.loss_at = match.start()

    def take_pair(self, text: str, *, wanted: bool) -> None:
        """Count by `120/300` without a name."""
        if self.step is not None or not wanted:
            return
        if (endless := _ENDLESS.search(text)) is not None:
            self.step = whole(endless[1])
            return
        if (both := _EPOCH_AND_STEP.match(text)) is not None:
            self.epoch, self.step = finite(both[1]), whole(both[2])
            return
        if self.epoch is None and (before := _EPOCH_BEFORE.search(text)) is not None:
            self.epoch, self.epochs = finite(before[1] or before[3]), whole(before[2])
            self._spans.append(before.span())
        for match in _PAIR.finditer(text):
            inside = any(start <= match.start() < end for start, end in self._spans)
            count, total = whole(match[1]), whole(match[2])
            if not inside and count is not None and total and count <= total:
                self.step, self.total = count, total
                return


def _seconds(rate: re.Match[str] | None) -> float | None:
    if rate is None or rate[1] == "?" or not (value := float(rate[1])):
        return None
    return 1 / value if rate[2] else value / 1000 if rate[3] == "ms" else value


def _tokens_per_second(text: str) -> float | None:
    found = _TOKENS.search(text)
    if found is None:
        return None
    return float(found[1].replace(",", "")) * {"k": 1e3, "m": 1e6}.get(found[2] or "", 1.0)


def number(text: str | None) -> float | None:
    """May be nan or infinite; None if the text is no number."""
    try:
        return None if text is None else float(text.replace(",", "").strip("'\""))
    except ValueError:
        return None


def finite(text: str | None) -> float | None:
    value = number(text)
    return value if value is not None and math.isfinite(value) and abs(value) <= 1e100 else None


def whole(text: str | None) -> int | None:
    """A count; None if the text is none."""
    value = finite(text)
    return int(value) if value is not None and 0 <= value < 1 << 53 and value == int(value) else None
