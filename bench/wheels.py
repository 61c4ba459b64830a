"""Lists and fetches the packages that memtop needs on a GPU machine without a network.

    python -m bench.wheels [--python 3.12] [--have FILE] [--to FOLDER] [--cuda 130]

Without `--to` it prints the list: name and version, as they are installed here. With `--to` it
fetches them as wheels for that version of CPython on Linux (x86-64) and prints their sizes.
`--have` is a file with the packages that the machine has, one name on each line (the output of
`pip list` or `pip freeze` there); without it, these are torch, transformers, accelerate, peft,
numpy, safetensors and pyarrow, with what they need. DeepSpeed is built here without its compiled
parts, which it compiles when it needs them. With `--cuda`, the wheel of bitsandbytes keeps its
libraries for the CPU and for this version of CUDA alone, an eighth of its size.

There: `pip install --no-index --no-deps FOLDER/*.whl`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
THERE = ("torch", "transformers", "accelerate", "peft", "numpy", "safetensors", "pyarrow")
NEEDLESS = ("mypy", "ruff", "import-linter", "pyarrow")
"""What only the checks of the source need; pyarrow is too large to carry."""
LIMIT_MIB = 64
# The oldest Linux that wheels of today are built for, and newer ones.
PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 27, 28, 31, 34))
OLD_PLATFORMS = ("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64")
_CUDA_LIBRARY = re.compile(r"bitsandbytes/libbitsandbytes_(cuda|rocm|xpu)\w*\.so$")


def wanted() -> list[Requirement]:
    """What pyproject.toml names, without the extras' own checks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    given = map(Requirement, [*project["dependencies"], *extras["train"], *extras["dev"]])
    return [one for one in given if canonicalize_name(one.name) not in NEEDLESS]


def closure(needed: Iterable[Requirement], python: str, without: Iterable[str] = ()) -> dict[str, str]:
    """Name to installed version of these requirements and of what they need, on that Python."""
    surroundings = default_environment() | {"python_version": python, "python_full_version": f"{python}.0"}
    left_out, found, seen = set(without), dict[str, str](), set[tuple[str, frozenset[str]]]()
    waiting = [one for one in needed if _applies(one, surroundings, ())]
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        # A package that is there may lack what one of its extras needs.
        if (name, extras) in seen or (name in left_out and not extras):
            continue
        seen.add((name, extras))
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            print(f"wheels: {name}: not installed here, so its version is not known", file=sys.stderr)
            continue
        if name not in left_out:
            found[name] = version
        further = map(Requirement, importlib.metadata.requires(name) or ())
        waiting += [one for one in further if _applies(one, surroundings, extras)]
    return dict(sorted(found.items()))


def _applies(requirement: Requirement, surroundings: Mapping[str, str], extras: Iterable[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**surroundings, "extra": extra}) for extra in ("", *extras))


def names_in(path: Path) -> set[str]:
    """The names in the output of `pip list` or `pip freeze`."""
    words = (re.match(r"[A-Za-z0-9][\w.-]*", line) for line in path.read_text().splitlines())
    return {canonicalize_name(word[0]) for word in words if word}


def fetch(name: str, version: str, python: str, folder: Path) -> None:
    """Fetch a wheel; DeepSpeed, of which there is none, is built."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    exact = f"{name}=={version.partition('+')[0]}"
    if name == "deepspeed":
        environment = os.environ | {"DS_BUILD_OPS": "0"}
        built = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), exact)
        subprocess.run([*pip, *built], check=True, env=environment)
        return
    platforms = [word for platform in (*PLATFORMS, *OLD_PLATFORMS) for word in ("--platform", platform)]
    which = ("--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms)
    subprocess.run([*pip, "download", *which, "--dest", str(folder), exact], check=True)


def strip(wheel: Path, cuda: str) -> None:
    """Remove all libraries for GPUs except that of one version of CUDA."""
    smaller = wheel.with_suffix(".tmp")
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as after:
        names = before.namelist()
        removed = {name for name in names if _CUDA_LIBRARY.search(name) and not name.endswith(f"_cuda{cuda}.so")}
        if not any(name.endswith(f"_cuda{cuda}.so") for name in names):
            raise SystemExit(f"wheels: --cuda {cuda}: {wheel.name} has {', '.join(sorted(removed))}")
        for entry in before.infolist():
            if entry.filename in removed:
                continue
            content = before.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if line.partition(",")[0] not in removed).encode()
            after.writestr(entry, content)
    smaller.replace(wheel)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="the version of CPython there, such as 3.12")
    parser.add_argument("--have", type=Path, help="a file with the names of the packages there")
    parser.add_argument("--to", type=Path, help="the folder for the wheels")
    parser.add_argument("--cuda", help="keep only this version in bitsandbytes, such as 130")
    given = parser.parse_args()
    have = names_in(given.have) if given.have else set(closure(map(Requirement, THERE), given.python))
    packages = closure(wanted(), given.python, have)
    if given.to is None:
        print("\n".join(f"{name}=={version}" for name, version in packages.items()))
        return 0
    given.to.mkdir(parents=True, exist_ok=True)
    for name, version in packages.items():
        fetch(name, version, given.python, given.to)
    for wheel in given.to.glob("bitsandbytes-*.whl") if given.cuda else ():
        strip(wheel, given.cuda)
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(given.to.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 2**20:6.1f} MiB  {name}")
    total = sum(sizes.values()) / 2**20
    print(f"{total:6.1f} MiB  in all; {'within' if total <= LIMIT_MIB else 'MORE THAN'} {LIMIT_MIB} MiB")
    return int(total > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
