"""The parent of the training program.

It stores the program's exit status even if the supervisor has died or the disk is full.

Started as `python -I shim.py ATTEMPT_FOLDER RUN_ID`; supervisors know it by these words. It uses
only the standard library and loads no other module of memtop. It reads `command.json`, starts the
program in a new session with its output in `output.log`, writes `process.json`, waits, and writes
`exit.json`. The supervisor has reserved the space for both files. A program that asks something
before it ends gets the pipe `answers` as its standard input.

As a subreaper it is the parent of every orphan among the program's descendants: data-loader
workers, daemons. It stays until the last of them has ended, so that they can be found as its
descendants.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
RESERVED = ".reserved"
"""The end of a file's name while it only reserves space."""
RETRY_SECONDS = 5.0


def started_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat)."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        return int(stat.read().rpartition(b")")[2].split()[19])


def write_json(path: str, value: object, seconds: float = RETRY_SECONDS) -> bool:
    """Write a file into its reserved space, then give it its name in one step. Both are on the disk
    when this returns.

    If that fails, try again for so many seconds. False if it cannot be written.
    """
    content = json.dumps(value).encode()
    deadline = time.monotonic() + seconds
    while True:
        try:
            _write(path, content)
        except OSError as error:
            if time.monotonic() >= deadline:
                sys.stderr.write(f"{path}: cannot be written: {error.strerror}\n")
                return False
            time.sleep(0.1)
        else:
            return True


def _write(path: str, content: bytes) -> None:
    reserved = path + RESERVED
    # The program may have put a pipe in its place, which would make this wait for ever.
    file = os.open(reserved, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        if os.write(file, content) != len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.ftruncate(file, len(content))
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(reserved, path)
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a network file system that does not do that
            raise
    finally:
        os.close(folder)


def answers() -> int:
    """The pipe into which the supervisor, or the next one, writes answers. It is opened for
    writing, too: so it never ends, and nobody has to hold it open."""
    os.mkfifo("answers", 0o600)
    return os.open("answers", os.O_RDWR | os.O_CLOEXEC)


def spawn(command: dict[str, object], log: int, standard_input: int) -> int:
    """Start the program in a new session.

    Returns its pid. The child reports a failed exec with exit status 127.
    """
    argv = [str(word) for word in command["argv"]]  # type: ignore[attr-defined]
    environment = dict(os.environ)
    for name, value in command["environment"].items():  # type: ignore[attr-defined]
        environment[name] = value
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        # An ignored signal stays ignored after exec, but the program must get Ctrl-C, hang-ups and
        # broken pipes as usual.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.chdir(str(command["cwd"]))
        os.dup2(standard_input, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"memtop: {argv[0]}: cannot be started in {command['cwd']}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def main(attempt: str) -> int:
    """Run the program. Returns its exit status, 128 + N for signal N, as shells do: the supervisor
    needs it if `exit.json` cannot be written.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(os.path.join(attempt, "command.json")) as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            # Another user has exchanged the run's folder since the supervisor checked it.
            raise SystemExit(
                f"memtop: {file.name}: is not yours alone: another user owns it, or may write it: "
                f"`ls -l {file.name}` shows its owner; if that is you, `chmod go-w {file.name}`"
            )
        command = json.load(file)
    # No path from here on: the run may be renamed while it runs, and another one gets its path.
    os.chdir(attempt)
    log = os.open("output.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    child = spawn(command, log, answers() if command.get("answers") else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    write_json(
        "process.json",
        {
            "pid": child,
            "started_ticks": started_ticks(child),
            "shim_pid": os.getpid(),
            "shim_started_ticks": started_ticks(os.getpid()),
        },
    )
    while True:
        pid, status = os.wait()
        if pid == child:
            break
    code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    if write_json("exit.json", {"status": code, "ended": time.time()}):
        wait_for_orphans()
    return code if code >= 0 else 128 - code


def wait_for_orphans() -> None:
    """Wait until no descendant of the program is left."""
    try:
        while True:
            os.wait()
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
