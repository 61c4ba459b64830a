"""A training program of its own: reports updates through its journal the way the agent does, at a pace it is told.

usage: program.py UPDATES SECONDS_PER_UPDATE [leave-worker] [ignore-int] [silent-agent]

silent-agent: connected and offering to stop, but it never answers.
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

journal = pathlib.Path(os.environ["MEMTOP_ATTEMPT_DIR"], "rank-0.jsonl")


def report(**values):
    with journal.open("a") as file:
        file.write(json.dumps({"time": time.time(), **values}) + "\n")


if "ignore-int" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if "leave-worker" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
silent = "silent-agent" in sys.argv
report(type="hello", rank=0, pid=os.getpid(), offers=["stop"] if silent else [])
if silent:
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(os.environ["MEMTOP_SOCKET"])
    agent.sendall(json.dumps({"type": "agent", "attempt": int(os.environ["MEMTOP_ATTEMPT"]), "rank": 0}).encode() + b"\n")
for update in range(1, int(sys.argv[1]) + 1):
    time.sleep(float(sys.argv[2]))
    print("update", update, flush=True)
    report(type="step", update=update, samples_seen=update * 4, loss=5 / update, step_seconds=float(sys.argv[2]))
