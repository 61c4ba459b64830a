"""NVIDIA's Xid numbers in plain words: what happened, and what to do."""

from __future__ import annotations

FAULTS_OF_PROGRAMS = frozenset({13, 31, 43, 45})
"""Xids that a program brings about and that leave the card sound."""

_WORDS: dict[int, str] = {
    13: "a program made an invalid access or instruction on the GPU (often an index out of range): "
    "its process fails; look for the error in that program",
    31: "a program touched GPU memory that is not its own (page fault): its process fails; look for the error in that program",
    43: "a program's work on the GPU was stopped after a fault of its own: its process must be started again",
    45: "the GPU's work of a process was cleared away, as when a process is ended or after an error before this one",
    48: "an uncorrectable (double-bit) memory error: processes on this GPU may compute wrongly; "
    "end them and reset the GPU, and have the card checked if it comes again",
    63: "the card puts a spare row or page in place of bad memory: reset the GPU when its work is done, to complete it",
    64: "the card could not put spare memory in place of bad memory: end its work and reset the GPU; "
    "if it comes again, have the card replaced",
    74: "an NVLink connection had an error: jobs over several GPUs may fail; reset the GPUs, "
    "then check bridge, cable or switch",
    79: "the GPU has fallen off the bus: nothing reaches it any more; power the machine off and on, "
    "and check power supply, cables and cooling if it comes again",
    94: "an uncorrectable memory error that was contained: only the process that used the memory fails; start it again, "
    "and reset the GPU when its work is done",
    95: "an uncorrectable memory error that was not contained: all work on this GPU is at risk; end it and reset the GPU",
    119: "the GPU's own firmware does not answer: reset the GPU; if that does not help, power the machine off and on",
    120: "the GPU's own firmware reported an error: reset the GPU; if that does not help, power the machine off and on",
}


def xid_words(code: int) -> str:
    """One sentence for a person: what this Xid means and what to do."""
    meaning = _WORDS.get(code, "the driver reported an error of the GPU that memtop has no words for: see dmesg")
    return f"Xid {code}: {meaning}"
