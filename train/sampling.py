"""What the model writes for a few prompts while it trains. The training is the same without it.

One prompt at a time, and each token with a forward pass over all tokens before it, without a cache:
so it works with every model and strategy, and needs less memory than an update.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from memtop.presets import Settings
from memtop.presets.schema import Sampling
from memtop.train import BadInputError, first_line
from memtop.train.agent.failures import is_allocation_failure
from memtop.train.agent.memory import free_cache
from memtop.train.data.tokens import Tokens
from memtop.train.engine import Engine
from memtop.train.exchange import Ranks

MOST_PROMPTS = 16
MOST_CHARACTERS = 1000
"""Of a prompt, and of what is written for it."""
_FEWEST_TOKENS = 8
"""After memory ran out, sampling ends rather than write fewer new tokens than this."""

Logits = Callable[..., torch.Tensor]


class SampledTexts(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one sampling."""

    prompts: list[str] = []
    texts: list[str] = []
    tokens: int = 0
    """New tokens of all prompts."""
    max_new_tokens: int = 0
    seconds: float = 0.0
    problem: str | None = None
    """Why texts are missing; None if none are."""


def used_prompts(path: str) -> list[str]:
    """The first prompts of a file, one in each line; BadInputError if there are none."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"sample.prompts {path}: cannot be read: {first_line(error)}; no samples are written") from None
    found = [line for line in lines if line.strip()][:MOST_PROMPTS]
    if not found:
        raise BadInputError(f"sample.prompts {path}: has no prompts; write one in each line")
    return found


def varied(sample: Sampling, number: int) -> Sampling:
    """For the prompt with this number: each has its own random choices."""
    return msgspec.structs.replace(sample, seed=sample.seed + number)


def prompt_ids(tokens: Tokens, task: str, prompt: str) -> list[int]:
    """The ids of a prompt, as the samples of this task begin."""
    if task == "seq2seq":
        return [*tokens.encode(prompt), tokens.end]
    dialogue = tokens.chat(prompt, "") if task == "sft" else None
    if dialogue is not None:
        return dialogue[0]
    return [*([] if tokens.begin is None else [tokens.begin]), *tokens.encode(prompt)]


class GivenUp(Exception):
    """Another rank cannot go on."""


class InStep:
    """Lets a rank leave a forward pass that gathers weights from all ranks (ZeRO-3).

    Before each gathering the ranks ask each other, on the CPU, whether all of them are there. So
    one that has failed is missed at the next question, and none waits for it in a collective.
    What the gathering allocates is tried before the question: a rank fails before it, not in it.
    """

    def __init__(self, engine: Engine, ranks: Ranks) -> None:
        self._engine = engine
        self._ranks = ranks

    def check(self) -> None:
        """GivenUp if a rank has failed since the last question."""
        if self._ranks.any(False):
            raise GivenUp

    def failed(self, error: Exception) -> None:
        """Tell the others, unless one of them has told this rank, and drop what was gathered."""
        if not isinstance(error, GivenUp):
            self._ranks.any(True)
        self._engine.release_gathered()

    def agreed(self, token: int) -> int:
        """The first rank's token, when all ranks have got one."""
        self.check()
        return self._ranks.from_first(token)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask before each gathering inside the block, and at its end."""
        modules = [one for one in self._engine.objective.modules() if next(one.parameters(recurse=False), None) is not None]
        # Before DeepSpeed's own hooks, which gather.
        hooks = [one.register_forward_pre_hook(self._before, prepend=True) for one in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.check()

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        torch.empty(self._engine.gathered_bytes(module), dtype=torch.uint8, device=self._engine.accelerator.device)
        self.check()


class Writer:
    """Continues a prompt, token by token.

    `logits` is the objective: it gives [b, v] for the last position. `in_step`: all ranks write
    together, with the first one's tokens.
    """

    def __init__(
        self,
        logits: Logits,
        tokens: Tokens,
        settings: Settings,
        config: Any,
        device: torch.device,
        in_step: InStep | None = None,
    ) -> None:
        self._logits = logits
        self._tokens = tokens
        self._task = settings.task
        self._device = device
        self._in_step = in_step
        text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
        self._start = getattr(config, "decoder_start_token_id", None)

    def __call__(self, prompt: str, sample: Sampling) -> list[int]:
        """The ids of the new tokens, without the end."""
        ids = prompt_ids(self._tokens, self._task, prompt)
        generator = torch.Generator().manual_seed(sample.seed)
        found: list[int] = []
        if self._task == "seq2seq":
            begin = [self._tokens.pad if self._start is None else self._start]
            while len(found) < sample.max_new_tokens:
                token = self._next({"input_ids": ids, "decoder_input_ids": begin + found}, sample.temperature, generator)
                if token == self._tokens.end:
                    break
                found.append(token)
            return found
        if self._longest is not None:
            # The end of a prompt that is too long, with place for what follows.
            ids = ids[-max(1, self._longest - sample.max_new_tokens) :]
        while len(found) < sample.max_new_tokens and (self._longest is None or len(ids) + len(found) < self._longest):
            token = self._next({"input_ids": ids + found}, sample.temperature, generator)
            if token == self._tokens.end:
                break
            found.append(token)
        return found

    def _next(self, inputs: dict[str, list[int]], temperature: float, generator: torch.Generator) -> int:
        given = {name: torch.tensor([ids], device=self._device) for name, ids in inputs.items()}
        if self._in_step is not None:
            # The pass begins with a collective of its own.
            self._in_step.check()
        logits = self._logits(**given)[0].float().cpu()[: self._tokens.vocabulary]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            # Logits that are not finite have no probabilities.
            shares = torch.softmax(torch.nan_to_num(logits / temperature), 0)
            token = int(torch.multinomial(shares, 1, generator=generator))
        return token if self._in_step is None else self._in_step.agreed(token)


class Sampler:
    """Samples at updates that the settings name. All ranks call it together.

    The first rank writes. If the parameters are sharded (ZeRO-3), every pass needs all ranks: then
    all of them write, with the first one's tokens, and stop together if one of them fails.
    """

    def __init__(self, settings: Settings, engine: Engine, tokens: Tokens, ranks: Ranks) -> None:
        self._engine = engine
        self._tokens = tokens
        self._ranks = ranks
        sharded = settings.zero.stage == 3 and engine.accelerator.num_processes > 1
        self._in_step = InStep(engine, ranks) if sharded else None
        model: Any = engine.model
        self._write = Writer(engine.objective, tokens, settings, model.config, engine.accelerator.device, self._in_step)
        self._most = settings.sample.max_new_tokens
        self._prompts, self.problem = self._read(settings.sample.prompts)

    def _read(self, path: str) -> tuple[list[str], str | None]:
        """The prompts, the same on all ranks, and why there are none."""
        found: tuple[list[str], str | None] = ([], None)
        if self._engine.accelerator.is_main_process:
            try:
                found = (used_prompts(path), None)
            except BadInputError as error:
                found = ([], str(error))
        return self._ranks.from_first(found)

    @property
    def is_off(self) -> bool:
        """Whether there is nothing to write any more."""
        return not self._prompts or not self._most

    def __call__(self, sample: Sampling) -> SampledTexts:
        """Write a text for each prompt. A lack of memory is no error: the next sampling is smaller.

        Model, random states and buffers are as before afterwards.
        """
        started = time.perf_counter()
        most = self._most = min(self._most, sample.max_new_tokens)
        sample = msgspec.structs.replace(sample, max_new_tokens=most)
        found: list[list[int]] = []
        problem: str | None = None
        if self._in_step is not None or self._engine.accelerator.is_main_process:
            try:
                # The outer block ends last, when nothing can fail any more.
                with self._in_step.asking() if self._in_step is not None else nullcontext():
                    self._write_all(sample, found)
            except Exception as error:  # noqa: BLE001 - the training goes on, whatever it is
                if self._in_step is not None:
                    self._in_step.failed(error)
                if not isinstance(error, GivenUp):
                    problem = self._smaller(error)
            free_cache()
        each = self._ranks.from_each((problem, self._most))
        self._most = min(most for _, most in each)
        problem = next((one for one, _ in each if one is not None), None)
        texts = [self._tokens.decode(ids)[:MOST_CHARACTERS] for ids in found]
        prompts = [prompt[:MOST_CHARACTERS] for prompt in self._prompts]
        return SampledTexts(
            prompts=prompts,
            texts=texts,
            tokens=sum(map(len, found)),
            max_new_tokens=most,
            seconds=time.perf_counter() - started,
            problem=problem,
        )

    def _write_all(self, sample: Sampling, found: list[list[int]]) -> None:
        """Append the tokens for each prompt."""
        with unchanged(self._engine.objective), torch.no_grad():
            for number, prompt in enumerate(self._prompts):
                found.append(self._write(prompt, varied(sample, number)))

    def _smaller(self, error: Exception) -> str:
        """Write less from now on; return what happened."""
        if not is_allocation_failure(error):
            self._most = 0
            return f"no samples any more: {type(error).__name__}: {first_line(error)}"
        half = self._most // 2
        self._most = half if half >= _FEWEST_TOKENS else 0
        if self.is_off:
            return "memory ran out while samples were written; no samples any more"
        return f"memory ran out while samples were written; the next ones have at most {self._most} tokens"


@contextmanager
def unchanged(objective: torch.nn.Module) -> Iterator[None]:
    """Inside the block the model is in evaluation mode. After it, everything that an update uses is
    as before: modes, buffers and random states."""
    modes = [(module, module.training) for module in objective.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in objective.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    states = random.getstate(), np.random.get_state()
    objective.eval()
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        with torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for module, mode in modes:
            module.training = mode
