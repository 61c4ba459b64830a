"""A lock in the folder of a compiled extension: removed if no process compiles, left if one
does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.file_baton import FileBaton

from memtop.train import BadInputError, compile_lock
from memtop.train.compile_lock import await_compiled, extension_folder
from memtop.train.optimizers import build_optimizer
from tests.forking import Program
from tests.train.launching import printed_by
from tests.train.support import edited

ROOT = Path(__file__).resolve().parents[2]

WHAT = "optimizer cpu_adam"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch looks for the lock of an extension called `some`."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = extension_folder("some")
    assert folder == tmp_path / "some"
    return folder / "lock"


@contextmanager
def compiler(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock as torch does, until it is asked to release it or is killed."""
    code = (
        "import sys; from torch.utils.file_baton import FileBaton; baton = FileBaton(sys.argv[1]); "
        "assert baton.try_acquire(); print('taken', flush=True); sys.stdin.readline(); baton.release()"
    )
    process = Program([sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def looks(then: dict[int, Callable[[], object]]) -> Callable[[float], None]:
    """A sleep that does something else at its n-th call."""
    calls = 0

    def sleep(seconds: float) -> None:
        nonlocal calls
        calls += 1
        then.get(calls, lambda: None)()

    return sleep


def test_the_lock_of_a_killed_compilation_is_removed(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with compiler(lock) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert lock.exists()
    await_compiled("some", what=WHAT, sleep=looks({}))
    assert not lock.exists()
    assert FileBaton(str(lock)).try_acquire(), "torch would continue"
    assert capsys.readouterr().out == f"memtop: removed {lock}, left by a compilation that was killed\n"


def test_the_lock_of_a_living_compilation_is_waited_for(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with compiler(lock) as process:
        there: list[bool] = []

        def release() -> None:
            there.append(lock.exists())
            process.communicate("\n")

        await_compiled("some", what=WHAT, sleep=looks({50: release}))
        assert there == [True], "left alone while it was held"
        assert process.returncode == 0, "it could release its lock"
    assert capsys.readouterr().out == f"memtop: {WHAT}: waiting until another process has compiled it in {lock.parent}\n"


def test_the_wait_ends_when_the_compiling_process_is_killed(lock: Path) -> None:
    with compiler(lock) as process:

        def kill() -> None:
            process.kill()
            process.wait()

        await_compiled("some", what=WHAT, sleep=looks({5: kill}))
    assert not lock.exists()


def test_a_lock_between_closing_and_removing_is_not_stale(lock: Path) -> None:
    lock.touch()
    removed: list[str] = []

    def finish() -> None:
        # A FileNotFoundError here would end the compiling process.
        lock.unlink()
        removed.append("by its owner")

    await_compiled("some", what=WHAT, sleep=looks({1: finish}))
    assert removed == ["by its owner"]


def test_a_new_lock_at_the_same_path_is_not_removed(lock: Path) -> None:
    lock.touch()
    held = lock.with_name("held")
    with compiler(held) as process:
        there: list[bool] = []

        def end() -> None:
            there.append(lock.exists())
            process.kill()
            process.wait()

        await_compiled("some", what=WHAT, sleep=looks({1: lambda: held.replace(lock), 9: end}))
    assert there == [True]
    assert not lock.exists()


def test_without_a_lock_there_is_no_wait(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await_compiled("some", what=WHAT, sleep=lambda seconds: pytest.fail("waited"))
    assert capsys.readouterr().out == ""


def test_ninja_is_found_where_only_the_interpreters_folder_has_it(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment need not be activated."""
    if not Path(sys.executable).with_name("ninja").exists():
        pytest.skip("ninja is installed elsewhere")
    monkeypatch.setenv("PATH", "/nowhere")
    assert shutil.which("ninja") is None
    await_compiled("some", what=WHAT)
    assert shutil.which("ninja") == str(Path(sys.executable).with_name("ninja"))


def test_a_wait_that_is_too_long_ends_with_advice(lock: Path) -> None:
    with compiler(lock) as process:
        with pytest.raises(BadInputError) as ended:
            await_compiled("some", what=WHAT, longest=120.0, sleep=looks({}))
        assert lock.exists()
        process.communicate("\n")
        assert process.returncode == 0
    assert str(ended.value) == (
        f"{WHAT}: {lock} is still there after 2 min: end the process that compiles there, or delete the file if there is none"
    )


def test_a_lock_on_a_network_file_system_is_not_removed(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.touch()
    monkeypatch.setattr(compile_lock, "file_system", lambda path: "nfs4")
    with pytest.raises(BadInputError, match="is still there after 1 min"):
        await_compiled("some", what=WHAT, longest=60.0, sleep=looks({}))
    assert lock.exists()


def test_the_file_system_is_the_nearest_mount() -> None:
    assert compile_lock.file_system(Path("/dev/shm/nowhere/lock")) == "tmpfs"
    assert compile_lock.file_system(Path("/proc/self/status")) == "proc"


def test_processes_that_check_a_lock_at_once_do_not_end_each_other(lock: Path) -> None:
    # The kernel signals the owner of a lease when another process opens the file; by default that
    # ends the owner.
    code = (
        "import sys; from memtop.train.compile_lock import unused_lock; from pathlib import Path\n"
        "for _ in range(3000): unused_lock(Path(sys.argv[1]))"
    )
    lock.touch()
    many = [Program([sys.executable, "-c", code, str(lock)], cwd=ROOT) for _ in range(3)]
    assert [process.wait(timeout=200) for process in many] == [0, 0, 0]
    assert lock.exists()


def test_several_processes_remove_a_stale_lock_once(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock.touch()
    threads = [threading.Thread(target=await_compiled, args=("some",), kwargs={"what": WHAT}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not lock.exists()
    assert capsys.readouterr().out.count("removed") == 1


# --- with real compilations
# ---------------------------------------------------------------------------------------------

COMPILE = """
import sys
from pathlib import Path
from torch.utils import cpp_extension
from memtop.train.compile_lock import compiling
source = Path(sys.argv[1])
with compiling("some", what="this test", enter=lambda phase: print("phase", phase, flush=True)):
    cpp_extension.load("some", [str(source)], is_python_module=False)
    print("compiled", flush=True)
"""


def compile_some(folder: Path, compiler: str = "g++") -> subprocess.Popen[str]:
    """A process that compiles one line, without torch's own headers."""
    source = folder / "some.cpp"
    source.write_text('extern "C" int answer() { return 42; }\n')
    surroundings = {**os.environ, "TORCH_EXTENSIONS_DIR": str(folder / "built"), "CXX": compiler, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", COMPILE, str(source)]
    return Program(command, env=surroundings, cwd=folder, stdout=subprocess.PIPE, text=True)


def working_in(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder):
                found.append(process)
    return found


@pytest.mark.skipif(shutil.which("g++") is None or shutil.which("ninja") is None, reason="no g++ or no ninja here")
def test_a_killed_compilation_does_not_block_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "built" / "some"
    slow = tmp_path / "slow"
    slow.write_text('#!/bin/sh\ncase "$*" in *-c*) sleep 1000;; esac\nexec g++ "$@"\n')
    slow.chmod(0o755)
    first = compile_some(tmp_path, str(slow))
    compilers: list[psutil.Process] = []
    try:
        # ninja, its compiler, and last the compiler's child process, which works for long.
        until = time.monotonic() + 120
        while "sleep" not in [process.name() for process in compilers]:
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
            compilers = working_in(folder)
        first.kill()
        first.communicate()
        second = compile_some(tmp_path)
        assert second.stdout is not None
        # The children of the killed process are still working in the folder.
        assert second.stdout.readline() == "phase compiling\n"
        assert second.stdout.readline() == f"memtop: this test: waiting until another process has compiled it in {folder}\n"
        assert (folder / "lock").exists()
        for process in compilers:
            process.kill()
        printed, _ = second.communicate(timeout=120)
    finally:
        for process in compilers:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        first.kill()
        first.wait()
    assert printed.splitlines()[0] == f"memtop: removed {folder / 'lock'}, left by a compilation that was killed"
    assert printed.splitlines()[1:] == ["compiled", "phase loading"]
    assert second.returncode == 0
    third = compile_some(tmp_path)
    assert third.communicate(timeout=120)[0] == "compiled\n", "it has no phase: it is only loaded"


def test_deepspeeds_adam_is_not_loaded_while_a_stale_lock_exists(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adam = extension_folder("cpu_adam") / "lock"
    adam.touch()

    def built(*args: object, **options: object) -> torch.optim.Optimizer:
        assert not adam.exists(), "torch would wait forever"
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])

    monkeypatch.setattr("deepspeed.ops.adam.DeepSpeedCPUAdam", built)
    build_optimizer(edited(optimizer="cpu_adam"), [torch.nn.Parameter(torch.ones(1))])
    assert not adam.exists()


_IMPORTS = """
import json
import torch
from memtop.train.compile_lock import without_compiler
compiled = []
torch.compile = compiled.append
with without_compiler():
    import bitsandbytes, peft
    function = len
    assert torch.compile(function) is torch.compile(model=function) is torch.compile(dynamic=True)(function) is function
torch.compile("after")
print(json.dumps(compiled))
"""


def test_libraries_are_imported_without_torchs_compiler() -> None:
    assert printed_by("-c", _IMPORTS) == ["after"]
