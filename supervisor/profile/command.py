"""A command that starts a training program, taken apart: launcher, script, options. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from memtop.presets.program_profiles import ByFlag

PYTHON = re.compile(r"python[0-9.]*|pypy[0-9.]*")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
"""Launchers that are installed beside the Python that they start."""
_SHELL = re.compile(r"(ba|da|z|k)?sh")
# Nothing in these characters has a meaning for a shell, but for the quotation marks.
_PLAIN = re.compile(r"""[\w \t./,:@%+='"-]*""")
_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch", "deepspeed.launcher.runner")
_PROCESSES = ("--nproc_per_node", "--num_processes", "--num_gpus", "--nproc-per-node", "--num-processes", "--num-gpus")
_MACHINES = ("--nnodes", "--num_machines", "--num_nodes")


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """The words of a command, and what they mean."""

    words: tuple[str, ...]
    begins: int
    """The words from here on are the program's own."""
    script: str | None = None
    """As it is written: `train.py`. None for a module, or if the program is none of Python."""
    module: str | None = None
    """Of `python -m package.train`."""
    processes: int | None = 1
    """That the launcher starts; None if its command does not say."""

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.words[self.begins :]


class Given(NamedTuple):
    """An option in a command."""

    at: int
    """The index of the word that contains its value."""
    before: str
    """What is before the value in this word: `--batch_size=`."""
    value: str


def parsed(words: Sequence[str]) -> Command | None:
    """None if no script or module of Python is in the command."""
    words = tuple(words)
    at = 0
    while at < len(words):
        word, name = words[at], words[at].rpartition("/")[2]
        if word in ("-m", "--module") and at + 1 < len(words) and _takes_module(words[:at]):
            at += 1
            if words[at] not in _MODULES:
                module = words[at]
                if module.endswith(".py"):
                    break
                return Command(words=words, begins=at + 1, module=module, processes=_processes(words[:at]))
        elif word == "-c" and PYTHON.fullmatch(words[at - 1].rpartition("/")[2]):
            return None
        elif name.endswith(".py"):
            break
        at += 1
    else:
        return None
    return Command(words=words, begins=at + 1, script=words[at], processes=_processes(words[:at]))


def shell_text(words: Sequence[str]) -> str | None:
    """The text of `sh -c TEXT`; None for another command."""
    is_shell = len(words) == 3 and words[1] == "-c" and _SHELL.fullmatch(words[0].rpartition("/")[2])
    return words[2] if is_shell else None


def simple(text: str) -> tuple[str, ...] | None:
    """The words of a shell's text that is one command and means the same without the shell; None if
    it is more."""
    if not _PLAIN.fullmatch(text):
        return None
    try:
        words = tuple(shlex.split(text))
    except ValueError:
        return None  # a quotation mark is missing
    words = words[1:] if words[:1] == ("exec",) else words
    return words if words and "=" not in words[0] else None


def started_by(words: Sequence[str], starter: str) -> Command | None:
    """The command of a program that is started by a word or two of its own: `tune run`."""
    wanted = starter.split()
    for at in range(len(words)):
        if [words[at].rpartition("/")[2], *words[at + 1 : at + len(wanted)]] == wanted:
            begins = at + len(wanted)
            return Command(words=tuple(words), begins=begins, processes=_processes(words[begins:]))
    return None


def _takes_module(before: Sequence[str]) -> bool:
    """Whether `-m` belongs to Python or a launcher."""
    names = [word.rpartition("/")[2] for word in before]
    return any(PYTHON.fullmatch(name) or name in (*LAUNCHERS, "launch") for name in names)


def _processes(words: Sequence[str]) -> int | None:
    """How many processes the launcher starts."""
    machines, each = _count(words, _MACHINES), _count(words, _PROCESSES)
    if machines is None or each is None:
        return None
    return machines * each


def _count(words: Sequence[str], names: Sequence[str]) -> int | None:
    found = last(words, ByFlag(names=tuple(names)))
    if found is None:
        return 1
    return int(found.value) if found.value.isdecimal() and found.value != "0" else None


def last(words: Sequence[str], way: ByFlag, begins: int = 0, literals: str = "") -> Given | None:
    """The last of the words that give this option. `literals`: the script, in which a shortened
    option is not an option of its own."""
    found = None
    for at in range(begins, len(words)):
        word = words[at]
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if not _is_one_of(name, way, literals):
            short = next((one for one in way.names if _glued(word, one)), None)
            found = Given(at, short, word[len(short) :]) if short is not None else found
        elif equals:
            found = Given(at, f"{name}=", value)
        elif name.startswith("-") and at + 1 < len(words) and not words[at + 1].startswith("--"):
            found = Given(at + 1, "", words[at + 1])
    return found


def _glued(word: str, name: str) -> bool:
    """`-b8` of `-b`."""
    return len(name) == 2 and name[0] == "-" and name[1] != "-" and word.startswith(name) and word[2:].isdecimal()


def _is_one_of(name: str, way: ByFlag, literals: str) -> bool:
    # Hydra's words may begin with `+`.
    plain = name.lstrip("+").replace("-", "_")
    if any(plain == one.replace("-", "_") and (name[:1] == "-") == (one[:1] == "-") for one in way.names):
        return True
    if not way.shortened or len(name) < 4 or not name.startswith("--") or f'"{name}"' in literals or f"'{name}'" in literals:
        return False
    return any(one.startswith(name) for one in way.names)


def with_option(
    command: Command, way: ByFlag, value: str, *, name: str | None = None, literals: str = "", after: int = -1
) -> Command:
    """The command with this value of an option: in its place if that is behind the word `after`,
    otherwise at the end, where it comes last. `name`: how it is added, if not as the first."""
    words = list(command.words)
    given = last(words, way, command.begins, literals)
    if given is not None and given.at > after:
        words[given.at] = given.before + value
        return replace(command, words=tuple(words))
    name = name or way.names[0]
    end = words.index("--", command.begins) if "--" in words[command.begins :] else len(words)
    added = [name, value] if name.startswith("-") and way.form == "space" else [f"{name}={value}"]
    return replace(command, words=(*words[:end], *added, *words[end:]))


def with_words(command: Command, added: Sequence[str], literals: str = "") -> Command:
    """The command with these options: `--init_from=resume`, `--resume PATH`, `--resume`, `a=b`."""
    at = 0
    while at < len(added):
        word, following = added[at], added[at + 1] if at + 1 < len(added) else None
        name, equals, value = word.partition("=")
        if equals:
            command = with_option(command, ByFlag(names=(name,), form="equals"), value, literals=literals)
        elif word.startswith("-") and following is not None and not following.startswith("-"):
            command = with_option(command, ByFlag(names=(name,)), following, literals=literals)
            at += 1
        elif word not in command.arguments:
            command = replace(command, words=(*command.words, word))
        at += 1
    return command
