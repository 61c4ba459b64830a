"""Servers that tests start and share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import Runs, make_runs
from tests.nvml_double.double import driver, nvml_library  # noqa: F401 (fixtures)
from tests.serve.served import Served
from tests.test_streaming import over  # noqa: F401 (a fixture)


@pytest.fixture
def serve(runs: Runs) -> Iterator[Callable[..., Served]]:
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Served:
            served = Served(runs, *arguments)
            stack.callback(served.close)
            return served

        yield start


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    for runs in make_runs(tmp_path_factory.mktemp("demo")):
        served = Served(runs, "--demo")
        yield served
        served.close()
