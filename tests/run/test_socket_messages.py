"""Whatever a peer sends to the supervisor is answered or refused, and the server goes on."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from memtop.supervisor.run.events import AgentAnswer
from memtop.supervisor.run.server import Agents, ControlServer, FromAgent, Peer
from memtop.supervisor.wire import Answer, Outcome, Request

AGENT = b'{"type": "agent", "attempt": 1, "rank": 0, "pid": 7}\n'
DEEP = b"[" * 100_000 + b"]" * 100_000


async def answers(folder: Path, *lines: bytes) -> list[dict[str, object]]:
    """The answers to a peer that sends these lines and then a valid request."""
    agents = Agents()

    async def on_request(peer: Peer, request: Request) -> None:
        peer.send(Answer(id=request.id, outcome=Outcome.DONE, message="understood"))

    def on_agent(peer: Peer, message: FromAgent) -> None:
        agents.receive(peer, message, 1)

    server = ControlServer(folder / "s", on_request=on_request, on_agent=on_agent, on_gone=Mock())
    await server.start()
    told = []
    try:
        for sent in (lines, [b'{"type": "status", "id": 5}\n']):
            reader, writer = await asyncio.open_unix_connection(folder / "s")
            writer.write(b"".join(sent))
            writer.write_eof()
            told += [json.loads(line) for line in (await reader.read()).splitlines()]
            writer.close()
    finally:
        await server.close()
    return told


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (DEEP, "not understood: nested too deeply"),
        (b'{"a":' * 100_000, "not understood: nested too deeply"),
        (b'{"type": "subscribe", "id": 1, "history": 18446744073709551616}', "not understood: Expected `int` <= 100000"),
        (b'{"type": "subscribe", "id": 1, "history": -1}', "not understood: Expected `int` >= 0"),
        (b'{"type": "status", "id": 1' + b"0" * 400 + b"}", "not understood: Expected `int`"),
        (b'{"type": "restart", "id": 1, "change": {"max_updates": 1e400}}', "not understood: Number out of range"),
        (b'{"type": "restart", "id": 1, "change": {"state_before": 99999999999999999999}}', "not understood: Expected `int`"),
        (b'{"type": "agent", "attempt": 1, "rank": []}', "not understood: Expected `int`, got `array`"),
        (AGENT + b'{"type": "answer", "id": [1]}', "not understood: Expected `int`, got `array`"),
        (AGENT + b'{"type": "answer", "id": 1, "result": [1]}', "not understood: Expected `object`, got `array`"),
        (AGENT + b'{"type": "answer", "id": 1, "result": {"freed": 18446744073709551616}}', "not understood: "),
        (b"\xff\xfe", "not JSON"),
        (b"nothing", "not JSON"),
    ],
)
def test_what_is_not_understood_is_refused(line: bytes, words: str) -> None:
    # The kernel allows only short paths for sockets.
    with tempfile.TemporaryDirectory(prefix="memtop-") as folder:
        *refused, last = asyncio.run(answers(Path(folder), line + b"\n"))
    assert [one["outcome"] for one in refused] == ["refused"]
    assert str(refused[0]["message"]).startswith(words), refused
    assert (last["id"], last["message"]) == (5, "understood")


async def asked(folder: Path, answer: str) -> list[AgentAnswer]:
    """What the rank answers to a command, as the supervisor understands it."""
    agents, connected = Agents(), asyncio.Event()

    def on_agent(peer: Peer, message: FromAgent) -> None:
        if agents.receive(peer, message, 1) is not None:
            connected.set()

    server = ControlServer(folder / "s", on_request=AsyncMock(), on_agent=on_agent, on_gone=Mock())
    await server.start()
    try:
        reader, writer = await asyncio.open_unix_connection(folder / "s")
        writer.write(AGENT)
        await connected.wait()
        calling = asyncio.create_task(agents.call("free_cache", {0}))
        command = json.loads(await reader.readline())
        writer.write(answer.replace("ID", str(command["id"])).encode() + b"\n")
        found = await calling
        writer.close()
    finally:
        await server.close()
    return found


@pytest.mark.parametrize(
    ("answer", "ok", "words"),
    [
        ('{"type": "answer", "id": ID, "ok": true, "message": "freed", "result": {"after": {"rss_bytes": 5}}}', True, "freed"),
        ('{"type": "answer", "id": ID, "ok": "yes"}', False, "its answer is not understood: Expected `bool`"),
        ('{"type": "answer", "id": ID, "ok": true, "result": {"a": [1]}}', False, "its answer is not understood: Expected"),
    ],
)
def test_every_answer_of_a_rank_ends_the_wait_for_it(answer: str, ok: bool, words: str) -> None:
    with tempfile.TemporaryDirectory(prefix="memtop-") as folder:
        (found,) = asyncio.run(asyncio.wait_for(asked(Path(folder), answer), 60))
    assert found.ok is ok
    assert found.message.startswith(words)


async def flooded(path: Path) -> str:
    """The answer to a peer while many are idle or in the middle of a line. It ends once a peer that
    requests much and reads nothing has been disconnected."""
    gone = asyncio.Event()

    async def on_request(peer: Peer, request: Request) -> None:
        peer.send(Answer(id=request.id, outcome=Outcome.DONE, message="x" * (1 << 20) if request.id == 1 else "understood"))

    server = ControlServer(path, on_request=on_request, on_agent=Mock(), on_gone=lambda peer: gone.set())
    await server.start()
    writers = []
    try:
        for number in range(150):
            _, writer = await asyncio.open_unix_connection(path)
            writer.write(b"[" * 100_000 if number % 10 == 0 else b"")
            writers.append(writer)
        greedy_reader, greedy = await asyncio.open_unix_connection(path, limit=1)
        greedy.write(b'{"type": "status", "id": 1}\n' * 100)
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b'{"type": "status", "id": 2}\n')
        answer: str = json.loads(await reader.readline())["message"]
        await gone.wait()
        assert not greedy_reader.at_eof(), "it has read nothing"
        writers += [greedy, writer]
    finally:
        await server.close()
        for writer in writers:
            writer.transport.abort()
    return answer


def test_a_peer_that_reads_nothing_is_disconnected_and_many_peers_hold_up_nobody() -> None:
    with tempfile.TemporaryDirectory(prefix="memtop-") as folder:
        assert asyncio.run(asyncio.wait_for(flooded(Path(folder) / "s"), 60)) == "understood"


async def closed_after_its_path_was_taken(path: Path) -> bool:
    """Whether the second server can still be reached."""
    first, second = (ControlServer(path, on_request=AsyncMock(), on_agent=Mock(), on_gone=Mock()) for _ in range(2))
    await first.start()
    await second.start()
    await first.close()
    try:
        _, writer = await asyncio.open_unix_connection(path)
        writer.close()
    except OSError:
        return False
    finally:
        await second.close()
    return not path.exists()


def test_a_server_removes_only_its_own_socket() -> None:
    """A run may be deleted and created anew while its first supervisor is about to leave."""
    with tempfile.TemporaryDirectory(prefix="memtop-") as folder:
        assert asyncio.run(closed_after_its_path_was_taken(Path(folder) / "s"))
