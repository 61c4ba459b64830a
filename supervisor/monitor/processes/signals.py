"""Signals to one very process and no other: held by a pidfd, checked by its start time and its owner."""

from __future__ import annotations

import os
import pwd
import select
import signal
from collections.abc import Collection

from memtop.supervisor.errors import RefusedError
from memtop.supervisor.monitor.processes.proc import Owners, ProcessId, own_family, owners_of, started_ticks


class SignalRefused(RefusedError):
    """A signal was not sent; the text says why."""


class ProcessGone(SignalRefused):
    """There is no such process any more."""


class Kernel:
    """What ending processes asks of the kernel, call by call. Another one stands in for it in the model test."""

    def pidfd_open(self, pid: int) -> int:
        """A descriptor that stays with the process that has this pid now; OSError as the kernel gives it."""
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
        """Those whose process has ended, as soon as there is one, or none after `seconds`."""
        poller = select.poll()
        for descriptor in descriptors:
            # A pidfd becomes readable when the process has ended, even while its parent has not collected it.
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
    """A pidfd of this very process; the caller closes it. Raises SignalRefused where that is not possible."""
    try:
        descriptor = kernel.pidfd_open(identity.pid)
    except ProcessLookupError:
        raise ProcessGone(f"process {identity.pid} has already ended") from None
    except OSError as error:
        raise SignalRefused(f"process {identity.pid}: the kernel gives no safe handle ({error.strerror})") from error
    # From here on the pid cannot be given away unnoticed: the descriptor stays with the process we opened.
    now = kernel.started_ticks(identity.pid)
    if now == identity.started_ticks:
        return descriptor
    kernel.close(descriptor)
    if now is None:
        raise ProcessGone(f"process {identity.pid} has already ended")
    raise SignalRefused(f"process {identity.pid} is not the one that was chosen: the number has been used again")


def check_owner(pid: int, kernel: Kernel = KERNEL) -> None:
    """Raises SignalRefused unless the process is this user's own and acts with this user's rights; also for root."""
    owners = kernel.owners(pid)
    if owners is None:
        raise ProcessGone(f"process {pid} has already ended")
    mine = kernel.own_uid()
    if owners.real != mine:
        raise SignalRefused(f"process {pid} belongs to {user_name(owners.real)}: memtop ends only your own")
    if owners.effective != mine:
        raise SignalRefused(f"process {pid} acts with the rights of {user_name(owners.effective)}: memtop ends only your own")


def send_signal(descriptor: int, pid: int, number: signal.Signals, kernel: Kernel = KERNEL) -> None:
    """Send through a pidfd; the kernel's refusal becomes words."""
    try:
        kernel.send(descriptor, number)
    except ProcessLookupError:
        raise ProcessGone(f"process {pid} has already ended") from None
    except OSError as error:
        raise SignalRefused(f"process {pid}: the kernel refused {number.name}: {error.strerror}") from error


def signal_process(identity: ProcessId, number: signal.Signals) -> None:
    """Send a signal to this very process and no other. Raises ProcessGone or SignalRefused with the reason."""
    descriptor = open_process(identity)
    try:
        send_signal(descriptor, identity.pid, number)
    finally:
        os.close(descriptor)


def user_name(uid: int) -> str:
    """The user's name, or the number in words where the machine has no name for it (common in containers)."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
