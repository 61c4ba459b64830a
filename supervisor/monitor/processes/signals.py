"""Signals one process and no other: opens a pidfd, then compares start time and owner before it
sends."""

from __future__ import annotations

import os
import pwd
import select
import signal
from collections.abc import Collection

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.proc import Owners, ProcessId, own_family, owners_of, started_ticks


class SignalRefused(RefusedError):
    """The signal was not sent. The message gives the reason."""


class ProcessGone(SignalRefused):
    """The process has ended."""


class Kernel:
    """The kernel calls that ending a process needs. The model test replaces them."""

    def pidfd_open(self, pid: int) -> int:
        """A descriptor of the process that has this pid now. Raises OSError."""
        return os.pidfd_open(pid)

    def started_ticks(self, pid: int) -> int | None:
        return started_ticks(pid)

    def owners(self, pid: int) -> Owners | None:
        return owners_of(pid)

    def own_uid(self) -> int:
        return os.getuid()

    def own_family(self) -> frozenset[int]:
        return own_family()

    def send(self, descriptor: int, number: signal.Signals) -> None:
        signal.pidfd_send_signal(descriptor, number)

    def wait(self, descriptors: Collection[int], seconds: float) -> set[int]:
        """Wait at most `seconds` until a process has ended, and return the descriptors of all that
        have."""
        poller = select.poll()
        for descriptor in descriptors:
            # A pidfd becomes readable when the process has ended, even while its parent has not
            # collected it.
            poller.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poller.poll(max(0.0, seconds) * 1000)}

    def has_ended(self, descriptor: int) -> bool:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(0))

    def close(self, descriptor: int) -> None:
        os.close(descriptor)


KERNEL = Kernel()


def open_process(identity: ProcessId, kernel: Kernel = KERNEL) -> int:
    """A pidfd of this process, which the caller closes. Raises ProcessGone or SignalRefused."""
    try:
        descriptor = kernel.pidfd_open(identity.pid)
    except ProcessLookupError:
        raise ProcessGone(f"process {identity.pid} has already ended") from None
    except OSError as error:
        raise SignalRefused(f"process {identity.pid}: the kernel opens no pidfd for it ({error.strerror})") from error
    # From here on the descriptor stays with the process that we opened, even if its pid is reused.
    now = kernel.started_ticks(identity.pid)
    if now == identity.started_ticks:
        return descriptor
    kernel.close(descriptor)
    if now is None:
        raise ProcessGone(f"process {identity.pid} has already ended")
    raise SignalRefused(f"process {identity.pid} is not the one that was chosen: its pid was reused")


def check_owner(pid: int, kernel: Kernel = KERNEL) -> None:
    """Raise SignalRefused unless the process belongs to this user and has only this user's rights.

    Applies to root, too.
    """
    owners = kernel.owners(pid)
    if owners is None:
        raise ProcessGone(f"process {pid} has already ended")
    mine = kernel.own_uid()
    if owners.real != mine:
        raise SignalRefused(f"process {pid} belongs to {user_name(owners.real)}: memtop ends only your own")
    if owners.effective != mine:
        raise SignalRefused(f"process {pid} acts with the rights of {user_name(owners.effective)}: memtop ends only your own")


def send_signal(descriptor: int, pid: int, number: signal.Signals, kernel: Kernel = KERNEL) -> None:
    """Send a signal through a pidfd.

    Raises ProcessGone, or SignalRefused with the kernel's reason.
    """
    try:
        kernel.send(descriptor, number)
    except ProcessLookupError:
        raise ProcessGone(f"process {pid} has already ended") from None
    except OSError as error:
        raise SignalRefused(f"process {pid}: the kernel refused {number.name}: {error.strerror}") from error


def signal_process(identity: ProcessId, number: signal.Signals) -> None:
    """Send a signal to this process and no other.

    Raises ProcessGone or SignalRefused with the reason.
    """
    descriptor = open_process(identity)
    try:
        send_signal(descriptor, identity.pid, number)
    finally:
        os.close(descriptor)


def user_name(uid: int) -> str:
    """The user's name, or `uid N` if the machine has no name for it (common in containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
