"""Writes a trained model as files.

python -m memtop.train.export --settings FILE --state-dir FOLDER --out DIR [--adapter | --merge]

Writes the model of the newest complete state, or of the best one with `load_best_at_end`, in
Hugging Face's format: safetensors, configuration and tokenizer. Prints the folder to stdout and
everything else to stderr. Exit status: 0 done, 1 the files could not be written, 2 wrong usage or
bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from memtop.presets import Settings
from memtop.presets.schema import Zero
from memtop.train import BadInputError, TrainingError
from memtop.train.checkpoint import best_state, load_weights, saved_weights
from memtop.train.data.tokens import Tokens
from memtop.train.model import build_base, build_model, model_class, tokens_and_config, with_adapters
from memtop.train.run import read_settings
from memtop.train.state_files import (
    BrokenStateError,
    Manifest,
    ShardReader,
    leftovers,
    link_or_copy,
    read_manifest,
    states_of,
)

SHARD_SIZE = "5GB"


class ExportSource(msgspec.Struct, frozen=True):
    """The state to read: a private folder with links to it or copies, and where it was found."""

    links: Path
    found: Path
    manifest: Manifest


def main() -> int:
    parser = argparse.ArgumentParser(prog="memtop.train.export")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--adapter", action="store_true", help="LoRA: only the adapter")
    group.add_argument("--merge", action="store_true", help="QLoRA: merge into the base, without its 4-bit quantization")
    arguments = parser.parse_args()
    form = "adapter" if arguments.adapter else "merge" if arguments.merge else None
    # transformers loads DeepSpeed, which would look for a GPU and warn that there is none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # stdout is for the result; the libraries' output goes to stderr.
        with contextlib.redirect_stdout(sys.stderr):
            written = export(read_settings(arguments.settings), arguments.state_dir, arguments.out, form=form)
    except TrainingError as error:
        print(f"memtop: {error}", file=sys.stderr)
        return error.exit_status
    print(written, flush=True)
    return 0


def export(settings: Settings, state_dir: Path, out: Path, *, form: str | None = None) -> Path:
    """Write the model into `out`, a new or empty folder.

    `form`: "adapter", "merge" or None for the method's default.

    Writes a temporary folder and renames it into place. TrainingError if the user can solve the
    problem.
    """
    form = _checked_form(settings, form)
    out = _checked_target(out)
    # On the CPU, without what only training needs.
    settings = msgspec.structs.replace(settings, device="cpu", zero=Zero(), gradient_checkpointing=False, compile=False)
    with held_state(state_dir, best=settings.load_best_at_end) as source:
        tokens, config = tokens_and_config(settings)
        kind = _kind(source.manifest)
        temporary = out.with_name(f"{out.name}.tmp-{os.getpid()}")
        try:
            temporary.mkdir(parents=True)
            if form == "adapter":
                _write_adapter(settings, config, source, temporary)
            else:
                _write_whole(settings, config, tokens, source, kind, temporary)
            tokens.save(temporary)
            temporary.rename(out)
        except (OSError, SafetensorError) as error:
            raise TrainingError(f"{out}: cannot be written: {getattr(error, 'strerror', None) or error}") from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _report(settings, source, form, kind, out)
    return out


def _checked_form(settings: Settings, form: str | None) -> str:
    """ "whole" or "adapter"."""
    if settings.method == "full":
        if form is not None:
            raise BadInputError(f"--{form}: {settings.recipe} trained the whole model, so there is no adapter; leave it out")
        return "whole"
    # Requantized, a merged adapter would be rounded away; dequantized, the model is larger. So
    # QLoRA merges only on request.
    form = form or ("adapter" if settings.method == "qlora" else "merge")
    if form == "adapter" and not settings.model.get("path"):
        whose = "the base was drawn from the run's seed and is in no folder, so an adapter alone is of no use"
        raise BadInputError(f"--adapter: {whose}; " + ("give --merge" if settings.method == "qlora" else "leave it out"))
    return "adapter" if form == "adapter" else "whole"


def _checked_target(out: Path) -> Path:
    out = Path(os.path.expanduser(out)).absolute()  # noqa: PTH111 - Path's raises without a home folder
    if out.is_dir() and not any(out.iterdir()):
        return out
    if out.exists() or out.is_symlink():
        raise BadInputError(f"DIR {out}: exists already{' and is not empty' if out.is_dir() else ''}; give another folder")
    return out


@contextlib.contextmanager
def held_state(state_dir: Path, *, best: bool) -> Iterator[ExportSource]:
    """The best or newest complete state, kept by links or copies if a trainer replaces it."""
    bests = [best_state(state_dir), *leftovers(best_state(state_dir))] if best else []
    half_written = [*leftovers(best_state(state_dir)), *leftovers(state_dir)]
    problem: str | None = None
    for folder in (*bests, *states_of(state_dir)):
        if not folder.is_dir():
            continue
        with contextlib.ExitStack() as stack:
            try:
                links = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="export-", dir=state_dir.parent)))
                for path in folder.iterdir():
                    link_or_copy(path, links / path.name)
                manifest = read_manifest(links)
            except BrokenStateError as error:
                if folder in half_written:
                    continue
                problem = problem or str(error).replace(str(links), str(folder))
                continue
            except OSError as error:
                problem = problem or f"{folder}: cannot be read: {error.strerror}"
                continue
            if problem is not None:
                print(f"memtop: {problem}; using {folder} instead", file=sys.stderr)
            elif best and folder not in bests:
                print(f"memtop: no best state was kept; using {folder} instead", file=sys.stderr)
            yield ExportSource(links, folder, manifest)
            return
    if problem is None:
        raise BadInputError(f"{state_dir}: no state was saved yet; `memtop checkpoint` saves one")
    raise BadInputError(f"{problem}; no complete state is left")


def _kind(manifest: Manifest) -> torch.dtype:
    """bf16 if the model was trained in bf16, otherwise fp32."""

    return torch.bfloat16 if manifest.precision == "bf16" else torch.float32


def _write_whole(
    settings: Settings, config: Any, tokens: Tokens, source: ExportSource, kind: torch.dtype, folder: Path
) -> None:
    """Write the model, with its adapters merged if it has any."""
    if settings.method == "qlora":
        # The training rounded them to its precision in each product. In fp32 nothing is lost before
        # the adapters are added, and the final cast rounds once.
        model = with_adapters(settings, build_base(settings, config).dequantize(dtype=torch.float32))
    else:
        model = build_model(settings, config, mixed="bf16" if kind == torch.bfloat16 else "no")
    load_weights(ShardReader(source.links, source.manifest.files), model, source.found)
    if settings.method != "full":
        model = model.merge_and_unload()
    if not settings.model.get("path"):
        _name_special_ids(model, tokens)
    model.to(kind).save_pretrained(str(folder), max_shard_size=SHARD_SIZE)


def _name_special_ids(model: Any, tokens: Tokens) -> None:
    """Store the ids that a model without a path was trained with."""
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = tokens.begin, tokens.end, tokens.pad


def _write_adapter(settings: Settings, config: Any, source: ExportSource, folder: Path) -> None:
    """Write the adapter in peft's format.

    It only names the base, so only the base's shapes are needed.
    """
    with torch.device("meta"):
        base = model_class(settings).from_config(config)
    model: Any = with_adapters(settings, base)
    for adapter in model.peft_config.values():
        adapter.base_model_name_or_path = str(settings.model["path"])
    read = ShardReader(source.links, source.manifest.files)
    weights = {name: tensor for name, _, tensor in saved_weights(read, model, source.found)}
    model.save_pretrained(str(folder), state_dict=weights, save_embedding_layers=False)


def _report(settings: Settings, source: ExportSource, form: str, kind: torch.dtype, out: Path) -> None:
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    what = {"full": "the model", "lora": "the base with the adapter merged"}.get(
        settings.method, "the base with the adapter merged, dequantized: larger than the 4-bit base, the same values"
    )
    if form == "adapter":
        what, kind = f"the adapter of {settings.model['path']}", torch.float32
    name = "bf16" if kind == torch.bfloat16 else "fp32"
    where = f"update {source.manifest.updates} ({source.found.name})"
    print(f"memtop: exported {where}: {what}, in {name}, {size / 2**20:.1f} MiB", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
