"""Whether a file that a program has saved is whole, and the numbers in it.

Standard library only: the supervisor never loads torch. A file of torch.save is a zip archive with
one small pickle and a record for each tensor's storage. The pickle has the numbers, and names the
storages. Everything in it but plain values is replaced by an object that does nothing.
"""

from __future__ import annotations

import functools
import os
import pickle
import struct
import time
import zipfile
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec

from memtop.supervisor.run.record.folder import open_to_read

STEADY_SECONDS = 5.0
"""A file of an unknown format counts as whole when it was not written for so long."""
LIGHTNING = ".ckpt"
"""How the name of a checkpoint of Lightning ends; a folder with FSDP or DeepSpeed."""
_OF_LIGHTNING = (".metadata", "*.distcp", "latest", "*/*_states.pt")
"""What is only in its folders."""
_PICKLE_BYTES = 64 << 20
_HEADER_BYTES = 100 << 20
"""The largest header of a safetensors file."""
_ITEM_BYTES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QUInt8", "QInt8"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Of an element of torch's storages: `FloatStorage` has 4. Of others only the name counts."""

Stamp = tuple[int, int, int]
"""Inode, size and time of a file. A file that was written meanwhile has others."""


def stamp_of(path: Path) -> Stamp:
    """Raises OSError."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def why_not_whole(path: Path) -> str | None:
    """Why this file cannot be used, in one line; None if it is whole."""
    try:
        stamp = stamp_of(path)
        if not stamp[1]:
            return f"{path}: it is empty: the save was interrupted, or goes on"
        known, problem = _checked(path, stamp)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if not known and abs(time.time() - stamp[2] / 1e9) < STEADY_SECONDS:
        return f"{path}: it was written just now, and memtop does not know its format"
    return problem


def values_file(path: Path) -> Path:
    """The file with the numbers of a checkpoint: of a folder that Lightning saves with FSDP or
    DeepSpeed, the one in it; otherwise the path itself."""
    if not path.is_dir():
        return path
    states = sorted(path.glob("*/*mp_rank_00_model_states.pt"))
    return states[0] if states else path / "meta.pt"


def why_no_whole_folder(folder: Path) -> str | None:
    """Why this folder of Lightning cannot be used, in one line; None if it is whole.

    FSDP writes its shards, then `.metadata`, which names them, and `meta.pt` at the end. Of
    DeepSpeed, the first rank writes `latest` after its own files, and names the folder with those
    of all ranks in it; other ranks may still write theirs then. A folder of another kind is not
    judged.
    """
    values = values_file(folder)
    if not any(file for pattern in _OF_LIGHTNING for file in folder.glob(pattern)):
        return None if any(folder.iterdir()) else f"{values} is missing: the save was interrupted"
    last = values if values.name == "meta.pt" else folder / "latest"
    try:
        if last == values:
            before = [folder / ".metadata", *folder.glob("*.distcp")]
            problem = why_not_whole(values) or _lack_of_shards(folder)
        else:
            tag = last.read_text(errors="replace").strip()
            files = sorted(values.parent.glob("*.pt"))
            shards = [file for file in files if file.name.endswith("optim_states.pt")]
            before = [values, *shards[:1]]
            problem = next((one for file in files if (one := why_not_whole(file)) is not None), None)
            ranks = numbers_in(values, ("dp_world_size",)).get("dp_world_size", 0)
            models = len(files) - len(shards) if "zero_pp_rank_" in values.name else ranks  # with ZeRO 3
            there = min(len(shards) or ranks, models)  # without ZeRO there are none
            if problem is None and (tag != values.parent.name or there < ranks):
                problem = f"{values.parent}: it has {there} of {ranks} shards: the save was interrupted, or goes on"
        if problem is None and max(file.stat().st_mtime_ns for file in before) > last.stat().st_mtime_ns:
            problem = f"{folder}: {last.name} is older than the rest: the save was interrupted, or goes on"
    except FileNotFoundError as error:
        return f"{error.filename} is missing: the save was interrupted"
    except (OSError, ValueError) as error:
        return f"{folder}: cannot be read: {error}"
    return problem


def _lack_of_shards(folder: Path) -> str | None:
    """What FSDP's shards lack of what `.metadata` names; None if nothing. Raises OSError."""
    with open_to_read(folder / ".metadata") as file:
        try:
            named = _at(_Plain(file).load(), "storage_data")
            parts = [one.state for one in named.values()]
            ends = [(str(one["relative_path"]), int(one["offset"]) + int(one["length"])) for one in parts]
        except Exception as error:  # noqa: BLE001 - damaged pickles raise anything
            return f"{folder / '.metadata'}: cannot be read: {error!r}"
    for name, end in ends:
        size = (folder / name).stat().st_size
        if size < end:
            return f"{folder / name}: it has {size} of {end} bytes: the save was interrupted, or goes on"
    return None


@functools.lru_cache(maxsize=256)
def _checked(path: Path, stamp: Stamp) -> tuple[bool, str | None]:
    """Whether memtop knows the format, and what is wrong with the file."""
    with open_to_read(path) as file:
        begin = file.read(4)
        if begin.startswith(b"PK"):
            return True, _problem_of_zip(path, file)
        if path.suffix == ".safetensors":
            return True, _problem_of_tensors(path, file, stamp[1])
        if path.suffix == ".json":
            return True, _problem_of_json(path, file)
    return False, None


def _problem_of_zip(path: Path, file: BinaryIO) -> str | None:
    try:
        with zipfile.ZipFile(file) as archive:
            end = archive.start_dir
            if all(one.header_offset + one.compress_size < end for one in archive.infolist()):
                return _lack_of(path, archive)
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, struct.error):
        pass  # without its end it is no archive
    return f"{path}: its end is missing: the save was interrupted, or goes on"


def _lack_of(path: Path, archive: zipfile.ZipFile) -> str | None:
    """What a file of torch.save lacks although it has its end; None if nothing.

    An exception inside torch.save, such as that of Ctrl-C, leaves a file with an end: torch writes
    `version` and the end on the way out. The pickle is written before the storages, and names each.
    So a file is whole exactly if it has what the pickle names. Neither the last names nor numbers
    without a gap tell that. A pickle that cannot be read to its end names what it named until then:
    better too few than that a whole file is refused for ever.
    """
    sizes = {one.filename: one.file_size for one in archive.infolist()}
    pickles = _pickles_in(archive)
    if not pickles and all(name.endswith(("/version", "/byteorder", "/.data/serialization_id")) for name in sizes):
        return f"{path}: it has no data.pkl: the save was interrupted"
    if len(pickles) != 1:
        return None  # another kind of archive
    folder = pickles[0].filename.removesuffix("data.pkl")
    for key, wanted in _storages(archive, pickles[0]).items():
        size = sizes.get(f"{folder}data/{key}")
        if size is None:
            return f"{path}: it has no data/{key}: the save was interrupted"
        if size < wanted:  # more is right: the last part of a storage may be smaller than an element
            return f"{path}: its data/{key} has {size} of {wanted} bytes: the save was interrupted"
    return None


def _pickles_in(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    found = [one for one in archive.infolist() if one.filename.endswith("/data.pkl") and one.filename.count("/") == 1]
    for one in found:
        del one.CRC  # a program may tell torch to leave it out (set_crc32_options), and it is wrong then
    return found


def _storages(archive: zipfile.ZipFile, name: zipfile.ZipInfo) -> dict[str, int]:
    """The storages that the pickle names, with their bytes."""
    if name.file_size > _PICKLE_BYTES:
        return {}
    plain = None
    try:
        with archive.open(name) as values:
            plain = _Plain(values)
            plain.load()
    except OSError:
        raise
    except Exception:  # noqa: BLE001 - damaged pickles raise anything
        return {} if plain is None else plain.storages
    return plain.storages


def _problem_of_tensors(path: Path, file: BinaryIO, size: int) -> str | None:
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > _HEADER_BYTES:
        return f"{path}: it does not begin like a safetensors file"
    try:
        header = msgspec.json.decode(file.read(length), type=dict[str, Any])
        ends = [int(one["data_offsets"][1]) for name, one in header.items() if name != "__metadata__"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError, ValueError):
        return f"{path}: its header is not whole: the save was interrupted, or goes on"
    wanted = 8 + length + max(ends, default=0)
    return None if size == wanted else f"{path}: it has {size} of {wanted} bytes: the save was interrupted, or goes on"


def _problem_of_json(path: Path, file: BinaryIO) -> str | None:
    file.seek(0)
    try:
        msgspec.json.decode(file.read())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"{path}: cannot be decoded: {error}"
    return None


def numbers_in(path: Path, keys: tuple[str, ...]) -> dict[str, int]:
    """The whole numbers with these keys (`trainer.step`) in a JSON file or a file of torch.save, as
    far as it has them. OSError or ValueError if it cannot be read."""
    return dict(_numbers(path, stamp_of(path), keys))


@functools.lru_cache(maxsize=256)
def _numbers(path: Path, stamp: Stamp, keys: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    values = _json_values(path) if path.suffix == ".json" else _pickled_values(path)
    found = ((key, _at(values, key)) for key in keys)
    return tuple((key, number) for key, number in found if isinstance(number, int) and not isinstance(number, bool))


def _at(values: Any, key: str) -> Any:
    """The value with this key, where `.` is between the levels."""
    for name in key.split("."):
        inside = values.state if isinstance(values, _Anything) else values
        if not isinstance(inside, dict) or name not in inside:
            return None
        values = inside[name]
    return values


def _json_values(path: Path) -> Any:
    with open_to_read(path) as file:
        try:
            return msgspec.json.decode(file.read())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: cannot be decoded: {error}") from None


def _pickled_values(path: Path) -> Any:
    with open_to_read(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                (name,) = _pickles_in(archive)
                if name.file_size > _PICKLE_BYTES:
                    raise ValueError(f"{os.fspath(path)}: its list of values is too long to be read")
                with archive.open(name) as values:
                    return _Plain(values).load()
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - damaged pickles raise anything
            raise ValueError(f"{path}: its values cannot be read: {error!r}") from None


class _Anything:
    """Stands for an object that is not a plain value: a tensor, a class of the program."""

    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> _Anything:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Whatever the pickle gives."""

    def __call__(self, *_: Any, **__: Any) -> _Anything:
        return _Anything()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """An entry of a dictionary of a class of its own."""
        if not isinstance(self.state, dict):
            self.state = {}
        self.state[key] = value

    def append(self, _: Any) -> None:
        """An entry of a list of a class of its own."""

    def extend(self, _: Any) -> None:
        """Entries of a list of a class of its own."""

    def add(self, _: Any) -> None:
        """An entry of a set of a class of its own."""


class _Dictionary(dict[Any, Any]):
    """An OrderedDict; that of a model's weights has attributes, too."""

    def __setstate__(self, _: Any) -> None:
        """Nothing of it is needed."""


class _Plain(pickle.Unpickler):
    """Reads plain values, and calls nothing that the file names."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.storages: dict[str, int] = {}
        """The least bytes of each storage that was named."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Dictionary
        return type(name, (_Anything,), {}) if name.endswith("Storage") else _Anything

    def persistent_load(self, named: Any) -> Any:
        match named:
            case ("storage", type() as kind, str() as key, _, int() as elements):
                each = _ITEM_BYTES.get(kind.__name__.removesuffix("Storage"), 0)
                self.storages[key] = max(self.storages.get(key, 0), elements * each)
        return _Anything()
