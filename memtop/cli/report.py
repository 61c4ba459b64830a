"""`memtop report`: a run as one HTML page or as Markdown."""

from __future__ import annotations

from pathlib import Path

import click

from memtop.cli.common import find_run, readable_ledger
from memtop.cli.options import PATH, RUN_HELP, run_argument, runs_dir_option
from memtop.cli.output import print_lines, print_message
from memtop.supervisor.run.report.facts import read_facts
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
        facts = read_facts(folder)
    if as_markdown:
        print_lines(*markdown(facts).splitlines())
        return 0
    path = output or Path(f"{folder.name}.html")
    path.write_text(html(facts), encoding="utf-8", errors="replace")
    print_message(f"memtop: written to {path}")
    return 0
