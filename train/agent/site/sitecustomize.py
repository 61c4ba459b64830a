"""Loads memtop's agent. memtop puts this folder on PYTHONPATH when it starts a program.

Python imports `sitecustomize` once at start-up. This file first runs the `sitecustomize` that it
hides, if there is one, and then loads the agent under the name `memtop_agent`. It must never
prevent a program from starting.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load_hidden() -> None:
    """Run the `sitecustomize` that this file hides."""
    others = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _load_agent() -> None:
    package = os.path.dirname(_HERE)
    spec = importlib.util.spec_from_file_location(
        "memtop_agent", os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    if spec is None or spec.loader is None:
        raise ImportError("the agent's files are missing in " + package)
    agent = importlib.util.module_from_spec(spec)
    sys.modules["memtop_agent"] = agent
    spec.loader.exec_module(agent)
    agent.wait_for_torch()
    agent.watch_failures()
    agent.change_program()


try:
    _load_hidden()
finally:
    if os.environ.get("MEMTOP_ATTEMPT_DIR"):
        try:
            _load_agent()
        except Exception as error:  # noqa: BLE001 - the program must start, whatever goes wrong here
            sys.stderr.write("memtop: no reports from this process: %r\n" % (error,))
