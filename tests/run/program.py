"""An external command that reports updates through its journal as the agent does.

usage: program.py UPDATES|go SECONDS_PER_UPDATE [leave-worker] [silent-agent]

go: it trains until there is a file of that name in its folder. silent-agent: it is connected and
offers to stop, but it never answers.
"""

import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

journal = pathlib.Path(os.environ["MEMTOP_ATTEMPT_DIR"], "rank-0.jsonl")


def report(**values):
    with journal.open("a") as file:
        file.write(json.dumps({"time": time.time(), **values}) + "\n")


if "leave-worker" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
silent = "silent-agent" in sys.argv
report(type="hello", rank=0, pid=os.getpid(), offers=["stop"] if silent else [])
if silent:
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(os.environ["MEMTOP_SOCKET"])
    agent.sendall(json.dumps({"type": "agent", "attempt": int(os.environ["MEMTOP_ATTEMPT"]), "rank": 0}).encode() + b"\n")
last = None if sys.argv[1] == "go" else int(sys.argv[1])
for update in itertools.count(1):
    if pathlib.Path("go").exists() if last is None else update > last:
        break
    time.sleep(float(sys.argv[2]))
    print("update", update, flush=True)
    report(type="step", update=update, samples_seen=update * 4, loss=5 / update, step_seconds=float(sys.argv[2]))
