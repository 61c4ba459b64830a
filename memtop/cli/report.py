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


@click.command(epilog=RUN_HELP)
@run_argument
@click.option("--output", type=PATH, metavar="FILE", help="the page to write [RUN.html]")
@click.option("--markdown", "as_markdown", is_flag=True, help="print a summary as Markdown instead")
@runs_dir_option
def report(run_name: str, output: Path | None, as_markdown: bool, runs_dir: Path | None) -> int:
    """Write a run as one HTML page, to keep or to share.

    The page needs no network: memory with its bands, attempts, settings, curves, events and, after
    a failure, the diagnosis.
    """
    folder = find_run(run_name, runs_dir)
    with readable_ledger(folder):
        facts = read_facts(folder, energy_price())
    if as_markdown:
        print_lines(*markdown(facts).splitlines(), own=False)
        return 0
    path = output or Path(f"{folder.name}.html")
    path.write_text(html(facts), encoding="utf-8", errors="replace")
    print_message(f"memtop: written to {path}")
    return 0


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
