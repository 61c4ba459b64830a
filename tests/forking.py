"""Starts Python programs for tests in milliseconds: forks of a process that has imported their
libraries.

Importing torch, transformers and accelerate takes 3 to 6 s of CPU, and most tests of whole runs
start several programs. `Program` is a `subprocess.Popen` for `python -m MODULE`, `python -c CODE`
and `python SCRIPT`:

* It has already imported the libraries of others, but none of memtop's own modules. Programs that
  neither import torch nor start a program that does are forked from a process without torch: it is
  a tenth of the size, and its fork takes a tenth of the time.
* The kernel and the program see what they see after a real start: process ID, parent, session and
  group, signal handlers, exit status, descriptors, working directory, `/proc/PID/environ` and
  `/proc/PID/cmdline`, `sys.argv`, `sys.path`, standard streams and `sitecustomize`.
* It starts its own Python programs the same way: `memtop` its supervisor, the supervisor its shim,
  the shim the trainer, torchrun its ranks. The code that starts them is the product's.

How it works: a *starter* is a child process that waits for requests. It forks twice and the process
in the middle ends, so that the new process is an orphan. Its parent becomes the process that asked
for it, which is a subreaper at this moment. Then the new process takes on the command (`_become`).

Exec starts what a fork cannot: other programs, other interpreter options, and programs that change
the variables that an interpreter or a library reads when it starts. With MEMTOP_TESTS_EXEC=1, exec
starts everything.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.util
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

LONG = os.environ.get("MEMTOP_TESTS_EXEC") == "1"
"""Whether this is `make long`, which starts every program by exec and repeats things more often."""
_SMALL = (
    *("asyncio", "concurrent.futures.thread", "multiprocessing.reduction", "sqlite3", "uuid", "statistics", "tomllib"),
    *("msgspec", "psutil", "pynvml", "click", "platformdirs"),
)
_TORCH = (
    *("numpy", "safetensors.torch"),
    *("torch", "torch.distributed.run", "torch.distributed.tensor", "torch._dynamo", "torch.utils.data"),
    *("torch.multiprocessing.spawn", "torch.nn.parallel.distributed", "torch.utils.checkpoint"),
    *("transformers", "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    *("transformers.trainer", "accelerate", "accelerate.tracking", "accelerate.commands.launch"),
)
# Modules that start other programs: each of their processes has a starter.
_STARTING = ("memtop", "memtop.supervisor", "torch.distributed.run", "accelerate.commands.launch")
# How pytest-xdist starts a worker.
_WORKER = "import sys;exec(eval(sys.stdin.readline()))"
# Commands of memtop that start no training.
_SMALL_COMMANDS = (
    *("advise", "checkpoint", "compare", "config", "diagnose", "free", "notify", "report", "runs", "sample", "show"),
    *("stop", "strays"),
)
# What an interpreter or a library reads when it starts, or is imported.
_READ_EARLY = ("PYTHON", "LC_", "LANG", "LD_", "OMP_", "MKL_", "MALLOC_", "HF_", "TRANSFORMERS_")
_READ_LATE = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE")
_MESSAGE = 1 << 18
_SET_SUBREAPER, _GET_SUBREAPER, _SET_MM, _SET_MM_MAP = 36, 37, 35, 14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_by_exec = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_exec = os.execvpe


class Command(NamedTuple):
    """A command line of the interpreter, taken apart."""

    options: tuple[str, ...]
    kind: str
    """-m, -c, or empty for a script."""
    target: str
    words: tuple[str, ...]
    """What is left for the program."""


def parse(argv: Sequence[str]) -> Command | None:
    """None for what is not this interpreter, or has options with a meaning that only a new
    interpreter can give them."""
    if not argv or argv[0] != sys.executable:
        return None
    words = list(argv[1:])
    options = []
    while words and words[0] in ("-I", "-P", "-S", "-u"):
        options.append(words.pop(0))
    if len(words) > 1 and words[0] in ("-m", "-c"):
        return Command(tuple(options), words[0], words[1], tuple(words[2:]))
    if words and not words[0].startswith("-"):
        return Command(tuple(options), "", words[0], tuple(words[1:]))
    return None


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(_READ_EARLY) and k not in _READ_LATE}


class Request(NamedTuple):
    argv: tuple[str, ...]
    environment: dict[str, str]
    cwd: str
    own_session: bool
    umask: int
    ignored: tuple[int, ...]
    """The signals that the new process ignores."""
    prepare: str
    """Python code that the new process runs before it becomes the program: limits that its children
    inherit."""


class Starter:
    """The connection to a process that forks on request. One for each process that starts
    programs."""

    def __init__(self, connection: socket.socket, early: dict[str, str]) -> None:
        self._connection, self._early = connection, early
        self._one_at_a_time = threading.Lock()

    def can_start(self, argv: Sequence[str], environment: Mapping[str, str]) -> bool:
        return parse(argv) is not None and _early(environment) == self._early

    def start(self, request: Request, streams: Sequence[int]) -> int:
        """The ID of the new process, a child of this one."""
        with self._one_at_a_time, _adopting_orphans():
            socket.send_fds(self._connection, [json.dumps(request).encode()], list(streams))
            answer = self._connection.recv(64)
        if not answer:
            raise ChildProcessError("the starter of programs has ended")
        return int(answer)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    before = ctypes.c_int()
    _libc.prctl(_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    _libc.prctl(_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_SET_SUBREAPER, before.value, 0, 0, 0)


_starter: Starter | None = None
_base_path: list[str] = []


def _execute_child(self: subprocess.Popen[Any], *given: Any) -> None:
    """In place of Popen's method: the same arguments, by exec where the starter cannot do it."""
    code = _by_exec.__code__
    values = dict(zip(code.co_varnames[1 : code.co_argcount], given, strict=False))
    argv = values["args"]
    environment = dict(os.environ) if values["env"] is None else values["env"]
    prepare = getattr(self, "prepare", "")
    plain = not (values["shell"] or values["preexec_fn"] or values["pass_fds"]) and isinstance(argv, (list, tuple))
    starter = getattr(self, "starter", _starter)
    if starter is None or not plain or not starter.can_start([str(word) for word in argv], environment):
        assert not prepare, f"cannot be prepared, since it is started by exec: {argv}"
        _by_exec(self, *given)
        return
    pipes = [values[name] for name in ("p2cread", "c2pwrite", "errwrite")]
    ignored = tuple(sorted(_ignored() - {signal.SIGPIPE, signal.SIGXFSZ}))
    cwd = os.fspath(values["cwd"] or Path.cwd())
    own_session, umask = bool(values["start_new_session"]), os.umask(0)
    os.umask(umask)
    request = Request(tuple(map(str, argv)), environment, cwd, own_session, umask, ignored, prepare)
    self.pid = starter.start(request, [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)])
    self._child_created = True  # type: ignore[attr-defined]
    names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(values[name] for name in names))  # type: ignore[attr-defined]


class Program(subprocess.Popen[Any]):
    """A `subprocess.Popen` that forks where it can.

    `prepare` is Python code that the new process runs first; `torch` says whether it has imported
    torch already, and `imported` names further libraries.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        prepare: str = "",
        torch: bool | None = None,
        imported: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.prepare = prepare
        environment = options.get("env") or os.environ
        if torch is None:
            torch = bool(imported) or _starts_torch(list(args), environment, Path(options.get("cwd") or "."))
        self.starter = _starter_with((*_TORCH, *imported) if torch else (), environment)
        super().__init__(list(args), **options)

    _execute_child = _execute_child


def fork_workers() -> None:
    """Have pytest-xdist fork its workers, each with a starter of its own: torch and transformers
    are imported once for all of them."""
    global _starter
    _starter = _starter_with(_TORCH, os.environ)
    subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]


def run(
    args: Sequence[str], *, timeout: float | None = None, capture_output: bool = False, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """As `subprocess.run` without `check` and `input`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Program(args, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(list(args), process.returncode, out, err)


def runs_torch(code: str) -> bool:
    """Whether a program imports torch, and none that a test has made up."""
    libraries = r"^\s*(?:import|from) [^\n]*\b(?:torch|transformers|accelerate|(?:memtop|tests)\.train(?!\.agent))\b"
    return re.search(libraries, code, re.MULTILINE) is not None and "sys.modules[" not in code


def _starts_torch(argv: Sequence[str], environment: Mapping[str, str], folder: Path) -> bool:
    """Whether a program imports torch, or starts one that does. Where this is wrong, the program
    takes longer."""
    command = parse(argv)
    if command is None:
        return False
    if command.kind == "-c":
        return runs_torch(command.target)
    if command.kind == "":
        script = folder / command.target
        return script.is_file() and runs_torch(script.read_text(errors="replace"))
    if any(Path(place, "torch").is_dir() for place in environment.get("PYTHONPATH", "").split(os.pathsep) if place):
        return False  # its own torch, made up by a test
    name, *words = command.words or ("",)
    if command.target == "memtop.supervisor":
        return _trains(Path(name))
    if command.target != "memtop":
        return True
    if name == "train" and "--" in words:
        return _starts_torch(words[words.index("--") + 1 :], environment, folder)
    if name == "watch" and not {"--once", "--json", "--csv", "--prometheus"}.isdisjoint(words):
        return False
    if name in ("restart", "rollback", "watch") and "MEMTOP_RUNS_DIR" in environment:
        return any(_trains(path.parent) for path in Path(environment["MEMTOP_RUNS_DIR"]).glob("*/run.json"))
    return name not in _SMALL_COMMANDS and not name.startswith("-")


def _trains(run: Path) -> bool:
    """Whether the program of the run in this folder imports torch."""
    try:
        spec = json.loads((run / "run.json").read_bytes())
        return not spec["command"] or _starts_torch(spec["command"], {}, Path(spec["cwd"]))
    except (OSError, ValueError, KeyError):
        return True


_starters: dict[tuple[tuple[str, ...], frozenset[tuple[str, str]]], Starter | None] = {}


def _starter_with(libraries: tuple[str, ...], environment: Mapping[str, str]) -> Starter | None:
    """This process's starter that has imported these libraries, too, in this environment. It is
    started when first wanted."""
    if LONG:
        return None
    further = libraries[len(_TORCH) :]
    given = dict(environment if further else os.environ)
    if not further and (not libraries or "LD_LIBRARY_PATH" in environment):
        # One more with torch takes memory and seconds: only for tests with another driver.
        given = {name: value for name, value in given.items() if name not in _early(given)} | _early(environment)
    key = libraries, frozenset(_early(given).items())
    if key not in _starters:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        its_own = {name: value for name, value in given.items() if name != "PYTHONPATH"}
        with theirs:
            command = [sys.executable, str(Path(__file__)), *(further or libraries)]
            # Further libraries are imported by a fork of the starter that has torch.
            start = functools.partial(Program, torch=True) if further else subprocess.Popen
            start(command, stdin=theirs, env=its_own, cwd="/")
        _starters[key] = Starter(ours, _early(its_own)) if ours.recv(64) == b"ready" else None
    return _starters[key]


# --- in the starter -------------------------------------------------------------------------------


def _serve(connection: socket.socket) -> NoReturn:
    """Fork for each request until the other side is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        message, streams, *_ = socket.recv_fds(connection, _MESSAGE, 3)
        if not message:
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            child = os.fork()
            if child:
                os.write(writing, str(child).encode())
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.0005)
            request = Request(*json.loads(message))
            if request.own_session:
                os.setsid()
            _place(streams)
            _become(request)
        os.close(writing)
        os.waitpid(between, 0)
        connection.send(os.read(reading, 64))
        for descriptor in (reading, *streams):
            os.close(descriptor)


def _place(streams: Sequence[int]) -> None:
    """The three standard streams, and no other descriptor."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 100) for descriptor in streams]
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    os.closerange(3, 1 << 16)


def _ignored() -> set[signal.Signals]:
    return {number for number in signal.Signals if signal.getsignal(number) is signal.SIG_IGN}


def _become(request: Request) -> NoReturn:
    """Be the program that `exec` would have put in this process's place, and end as it ends."""
    global _starter
    argv, environment = request.argv, request.environment
    command = parse(argv)
    assert command is not None
    _starter = None
    if request.prepare:
        exec(compile(request.prepare, "<prepare>", "exec"), {})
    if command.kind == "-m" and command.target in _STARTING:
        _starter = Starter(_fork_starter(), _early(environment))
        subprocess.Popen._execute_child = _execute_child  # type: ignore[attr-defined]
    if command.target == _WORKER:
        early = _early(environment)
        _starters[_TORCH, frozenset(early.items())] = Starter(_fork_starter(), early)
        sys.modules["tests.forking"] = sys.modules[__name__]  # the worker finds its starter there
    os.execvpe = _execvpe
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN if number in request.ignored else signal.SIG_DFL)
    if signal.SIGINT not in request.ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    os.umask(request.umask)
    os.chdir(request.cwd)
    os.environ.clear()
    os.environ.update(environment)
    _show(argv, environment)
    _open_streams(unbuffered="-u" in command.options or bool(environment.get("PYTHONUNBUFFERED")))
    _end(_run(request, command))


def _execvpe(file: str, argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """In place of os.execvpe in the programs started here: the shim starts its program with it."""
    if parse(argv) is None or _early(environment) != _early(os.environ):
        _exec(file, list(argv), environment)
    for path in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if fcntl.fcntl(int(path.name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(int(path.name))
    umask = os.umask(0)
    _become(Request(tuple(argv), dict(environment), str(Path.cwd()), False, umask, tuple(_ignored()), ""))


def _fork_starter() -> socket.socket:
    """A starter for this process, before the program has changed anything."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        nothing = os.open(os.devnull, os.O_RDWR)
        connection = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 100)
        for number in range(3):
            os.dup2(nothing, number)
        os.closerange(3, connection)
        os.closerange(connection + 1, 1 << 16)
        _serve(socket.socket(fileno=connection))
    theirs.close()
    return ours


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv")),
        *(("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32)),
    )


_shown: list[Any] = []


def _show(argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Have /proc show this command line and environment; False where the kernel cannot."""
    row = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    code, data, stack = ([int(row[number - 3]) for number in numbers] for numbers in ((26, 27), (45, 46, 47), (28,)))
    bounds = []
    for words in (argv, [f"{name}={value}" for name, value in environment.items()]):
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        buffer = ctypes.create_string_buffer(text, len(text))
        _shown.append(buffer)
        bounds += [ctypes.addressof(buffer), ctypes.addressof(buffer) + len(text)]
    table = _MemoryMap(*code, *data, _libc.sbrk(0), *stack, *bounds, 0, 0, 0xFFFFFFFF)
    return _libc.prctl(_SET_MM, _SET_MM_MAP, ctypes.byref(table), ctypes.c_ulong(ctypes.sizeof(table)), 0) == 0


def _open_streams(*, unbuffered: bool) -> None:
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        before = getattr(sys, name)
        _shown.append(before)
        raw: Any = io.FileIO(number, "w" if number else "r", closefd=False)
        lines = not unbuffered and (number == 2 or raw.isatty())
        buffer = raw if unbuffered and number else io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        through = unbuffered and number > 0
        stream = io.TextIOWrapper(buffer, before.encoding, before.errors, line_buffering=lines, write_through=through)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(request: Request, command: Command) -> int:
    """Run the program in this interpreter; its exit status."""
    environment = request.environment
    isolated = "-I" in command.options
    paths = [] if isolated else [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = {"-m": str(Path.cwd()), "-c": "", "": str(Path(command.target).parent)}[command.kind]
    safe = isolated or "-P" in command.options or environment.get("PYTHONSAFEPATH")
    sys.path[:] = [*([] if safe else [own]), *paths, *_base_path]
    sys.argv = [command.kind or command.target, *command.words]
    sys.orig_argv = list(request.argv)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    importlib.invalidate_caches()
    try:
        if paths and "-S" not in command.options and importlib.util.find_spec("sitecustomize") is not None:
            importlib.import_module("sitecustomize")
        if command.kind == "-m":
            runpy.run_module(command.target, run_name="__main__", alter_sys=True)
        elif command.kind == "-c":
            module = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(command.target, "<string>", "exec"), module.__dict__)
        else:
            runpy.run_path(command.target, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - what an interpreter does at its top
        while error.__traceback__ is not None and error.__traceback__.tb_frame.f_code.co_filename == __file__:
            error.__traceback__ = error.__traceback__.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(status: int) -> NoReturn:
    """What the interpreter does at its end, as far as others can see it."""
    import atexit

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        status = status or 120
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def main() -> None:
    connection = socket.socket(fileno=0)
    sys.path.pop(0)
    _base_path.extend(sys.path)
    for name in (*_SMALL, *sys.argv[1:]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # A library may start a thread, which a fork would lose; a kernel may lack checkpoint/restore.
    if len(list(Path("/proc/self/task").iterdir())) > 1 or not _show(sys.orig_argv, os.environ):
        sys.exit("memtop's tests: programs cannot be forked here and are started by exec, which takes longer")
    # Each end of a program would take 30 ms for what these libraries give back then.
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    connection.send(b"ready")
    _serve(connection)


if __name__ == "__main__":
    main()
