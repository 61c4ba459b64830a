"""Who may open the dashboard in a browser. Rules on texts: no sockets, no clock.

A link with a token opens one browser, once. The browser gets a cookie for it, and every later
request needs that cookie. So a link that is found in a history or a log opens nothing.
"""

from __future__ import annotations

import ipaddress
import re
import secrets
import socket
from typing import NamedTuple

from memtop.cli.http_server import LOOPBACK, is_loopback

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\s:\[\]/@]+)(?::[0-9]{1,5})?")
_SAFE_METHODS = ("GET", "HEAD")


class Visit(NamedTuple):
    """What counts of a request."""

    method: str
    hosts: tuple[str, ...]
    """All its headers Host."""
    origin: str | None
    cookie: str | None
    """The value of memtop's cookie."""
    opens_socket: bool
    """It asks for the websocket, over which keys are sent."""


class Access:
    """The names under which this server may be reached, its token and its cookies."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._any_address = _is_any(host)
        self._names = _names_of(host)
        self._token = _secret()
        self._cookies: list[bytes] = []
        # Browsers send a cookie to every port of a host: two servers need two names.
        self.cookie_name = f"memtop_{secrets.token_hex(4)}"

    @property
    def url(self) -> str:
        """The link for the next browser."""
        host = socket.gethostname() if self._any_address else self._host
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self._port}/?token={self._token}"

    def use(self, token: str) -> str | None:
        """The new cookie for the right token, which is invalid from now on; None for another."""
        if not _equal(token, self._token.encode()):
            return None
        self._token, cookie = _secret(), _secret()
        self._cookies.append(cookie.encode())
        return cookie

    def why_wrong_address(self, visit: Visit) -> str | None:
        """Why the request was not meant for this server, or was sent by a page of another one."""
        name = _name_in(visit.hosts[0]) if len(visit.hosts) == 1 else None
        if name is None or not self._is_served(name):
            return "memtop is not served under this address (header Host)"
        if visit.origin is None:
            must = visit.opens_socket or visit.method not in _SAFE_METHODS
            return "memtop takes this from its own page only (no header Origin)" if must else None
        if visit.origin.lower() != f"http://{visit.hosts[0].lower()}":
            return "memtop takes requests from its own page only (header Origin)"
        return None

    def has_cookie(self, visit: Visit) -> bool:
        """Whether the request comes from a browser that was opened with a link."""
        return visit.cookie is not None and any(_equal(visit.cookie, cookie) for cookie in self._cookies)

    def _is_served(self, name: str) -> bool:
        if name in self._names:
            return True
        # A page of a stranger reaches this server under a name of the stranger's (DNS rebinding),
        # never under a bare address.
        return self._any_address and _is_address(name)


def _secret() -> str:
    return secrets.token_urlsafe(32)


def _equal(text: str, secret: bytes) -> bool:
    """In constant time."""
    return secrets.compare_digest(text.encode(errors="replace"), secret)


def _name_in(header: str) -> str | None:
    """The name or address in a header Host, without its port: behind `ssh -L`, the port is that of
    the other end."""
    found = _HOST.fullmatch(header)
    return None if found is None else found["name"].strip("[]").rstrip(".").lower()


def _names_of(host: str) -> frozenset[str]:
    if is_loopback(host):
        return frozenset({host.lower(), "localhost", LOOPBACK, "::1"})
    names = {host, socket.gethostname()}
    if _is_any(host):
        return frozenset(name.lower() for name in names | {"localhost"})
    try:
        names |= {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return frozenset({host.lower()})  # to listen there fails, too, and says why
    return frozenset(name.lower() for name in names)


def _is_any(host: str) -> bool:
    """Whether it stands for all addresses of this machine."""
    return _is_address(host) and ipaddress.ip_address(host).is_unspecified


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
