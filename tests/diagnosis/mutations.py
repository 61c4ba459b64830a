"""Changes that real logs undergo: launcher prefixes, colours, line folding, other encodings, cuts,
mixed programs."""

from __future__ import annotations

import random
from collections.abc import Callable

Random = random.Random

_PREFIXES = (
    "[rank{rank}]: ",
    "[default{rank}]:[rank{rank}]: ",
    "{rank}: [1,{rank}]<stderr>:",
    "(TrainWorker pid=4711{rank}, ip=10.0.0.{rank}) ",
    "2025-03-02T04:11:3{rank}.123456789Z ",
    "[2025-03-02 04:11:3{rank},123] ",
    "trainer-{rank}  | ",
    "# ",
    "> ",
    "> > ",
)
_COLOURS = ("\x1b[31m", "\x1b[1;91m", "\x1b[38;5;204m", "\x1b[0m", "\x1b[K", "\x1b]0;training\x07")


def prefix(text: str, rng: Random) -> bytes:
    front = rng.choice(_PREFIXES).format(rank=rng.randrange(8))
    return "\n".join(front + line for line in text.split("\n")).encode()


def colour(text: str, rng: Random) -> bytes:
    words = text.split(" ")
    return " ".join(rng.choice(_COLOURS) + word + "\x1b[0m" if rng.random() < 0.2 else word for word in words).encode()


def fold(text: str, rng: Random) -> bytes:
    """At a terminal's width, in the middle of words and numbers."""
    width = rng.randrange(40, 160)
    rows = []
    for line in text.split("\n"):
        rows += [line[at : at + width] for at in range(0, len(line), width)] or [""]
    return "\n".join(rows).encode()


def re_encode(text: str, rng: Random) -> bytes:
    encoding = rng.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "latin-1", "cp1252"))
    return text.encode(encoding, "replace")


def windows_ends(text: str, rng: Random) -> bytes:
    return text.replace("\n", "\r\n").encode()


def cut(text: str, rng: Random) -> bytes:
    data = text.encode()
    start, end = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[start:end]


def bars(text: str, rng: Random) -> bytes:
    """A progress bar that shares lines with the text between its frames."""
    rows = []
    for line in text.split("\n"):
        if rng.random() < 0.4:
            done = rng.randrange(1, 99)
            line = f"Epoch 2:  {done}%|{'█' * (done // 10):10}| {done}/100 [00:{done:02}<01:00,  1.00it/s, loss=1.9]\r{line}"
        rows.append(line)
    return "\n".join(rows).encode()


def interleave(text: str, rng: Random, other: str = "") -> bytes:
    """Two programs that write lines to one file, in random turns."""
    queues = [text.split("\n"), other.split("\n")]
    rows = []
    while any(queues):
        queue = rng.choice([queue for queue in queues if queue])
        rows.append(queue.pop(0))
    return "\n".join(rows).encode()


def scramble(text: str, rng: Random) -> bytes:
    """Bytes lost, doubled and changed."""
    data = bytearray(text.encode())
    for _ in range(rng.randrange(1, 30)):
        if data:
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = bytes(rng.randrange(256) for _ in range(rng.randrange(3)))
    return bytes(data)


HARMLESS: dict[str, Callable[[str, Random], bytes]] = {
    "prefix": prefix,
    "colour": colour,
    "fold": fold,
    "re-encode": re_encode,
    "line ends": windows_ends,
}
"""Changes that leave the content of a log alone."""

HARMFUL: dict[str, Callable[[str, Random], bytes]] = {"cut": cut, "bars": bars, "scramble": scramble}


def mutate(texts: list[str], index: int, rng: Random) -> tuple[str, bytes]:
    """Log `index` after one or several mutations, and their names."""
    text = texts[index]
    names = []
    for _ in range(rng.randrange(1, 4)):
        choice = rng.randrange(9)
        if choice == 0:
            name, data = "interleave", interleave(text, rng, rng.choice(texts))
        elif choice < 4:
            name, change = rng.choice(sorted(HARMFUL.items()))
            data = change(text, rng)
        else:
            name, change = rng.choice(sorted(HARMLESS.items()))
            data = change(text, rng)
        names.append(name)
        if name == "re-encode":
            return "+".join(names), data
        text = data.decode("utf-8", "replace")
    return "+".join(names), data


ORDINARY = (
    "loading Qwen/Qwen2.5-7B-Instruct with 15 shards",
    "model meta-llama/Llama-3.1-8B, tokenizer openai-community/gpt2-11b, adapter org/x-6b-lora-9",
    "{'learning_rate': 1e-6, 'weight_decay': 1e-7, 'adam_epsilon': 1e-15, 'warmup': 1e-11, 'eps': 1e-9}",
    "2025-11-07 11:06:15,137 INFO run of 2024-11-15, ends 2025-11-11T11:11:11-06:00",
    "torch==2.6.0 cuda-12.9 nccl-2.21.5-1 driver 535.139.15-2 transformers 4.46-7",
    "/mnt/data-7/run-11/ckpt-9/model-00015-of-00137.safetensors",
    "commit 9f7c6b1-15 sha256:137a139b143c135d134e-9 id=abc-11-7-6",
    "gpu memory 15.2 GiB of 79.1 GiB used, host 137 GiB free, 12 workers",
    "Downloading data:  37%|###7      | 139/375 [00:11<00:15, 12.2MB/s]",
    "rank 6 of 15, local_rank 7, port 29511, node-9 up",
    "job 143 step-137 exit-policy=never retries=-1 offset -9 -11 -15 -6 -7",
    "temperature -11.5 C, score -7, delta -6.0, scale 2**-15",
    "url https://huggingface.co/org/out-of-domain-7B/resolve/main/README.md?download=true&x=-9",
    "signal_quality=9, exit_layers=[-1, -6, -7], killed_tokens=0, allocated 3 slots of 15",
)
"""Lines of a healthy program: names of models, rates, dates in November, versions, paths, hashes
and a transfer. They hold the numbers of signals."""


def behind_ordinary(text: str) -> bytes:
    return "\n".join((*ORDINARY, text)).encode()


def among_ordinary(text: str) -> bytes:
    """An ordinary line after each line, but the first one, which shows a phase."""
    lines = text.split("\n")
    rows = [row for number, line in enumerate(lines) for row in (line, ORDINARY[1 + number % (len(ORDINARY) - 1)])]
    return "\n".join(rows).encode()
