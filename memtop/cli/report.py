"""`memtop report`: a run as one HTML page or as Markdown."""

from __future__ import annotations

import math
from pathlib import Path

import click

from memtop.cli.common import find_run, readable_ledger
from memtop.cli.configuration import configured
from memtop.cli.options import PATH, RUN_HELP, run_argument, runs_dir_option
from memtop.cli.output import print_lines, print_message
from memtop.supervisor.errors import UsageError
from memtop.supervisor.run.report.facts import Price, read_facts
from memtop.supervisor.run.report.page import html, markdown

_SHOWN = "-"
"""The FILE that stands for standard output."""


@click.command(epilog=RUN_HELP)
@run_argument
@click.option("--html", "page", type=PATH, metavar="FILE", help="the page to write [RUN.html]")
@click.option("--markdown", "summary", type=PATH, metavar="FILE", help="a summary as Markdown; - prints it")
@runs_dir_option
def report(run_name: str, page: Path | None, summary: Path | None, runs_dir: Path | None) -> int:
    """Write a run as one HTML page, to keep or to share.

    The page needs no network: memory with its bands, attempts, settings, curves, events and, after
    a failure, the diagnosis.
    """
    folder = find_run(run_name, runs_dir)
    with readable_ledger(folder):
        facts = read_facts(folder, energy_price())
    if summary == Path(_SHOWN):
        print_lines(*markdown(facts).splitlines(), own=False)
    elif summary is not None:
        _write(summary, markdown(facts))
    if page is not None or summary is None:
        _write(page or Path(f"{folder.name}.html"), html(facts))
    return 0


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="replace")
    print_message(f"memtop: written to {path}")


def energy_price() -> Price | None:
    """What the user pays for energy; None without a price. UsageError if it cannot be read."""
    value = configured("energy-price")
    if value.value is None:
        return None
    number, _, currency = value.value.strip().partition(" ")
    try:
        price = float(number)
    except ValueError:
        price = -1.0
    if not (0 <= price < math.inf and currency.strip()):
        raise UsageError(f'{value.where}: energy-price {value.value!r}: give a price and a currency, for example "0.30 EUR"')
    return Price(price, currency.strip())
