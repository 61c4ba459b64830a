"""Readability: no text is cut off without need, marks are explained, colours work on any
background."""

from __future__ import annotations

import math
import re
from itertools import combinations

import pytest
from rich.cells import cell_len
from textual.app import App
from textual.color import Color

from memtop.supervisor import wire
from memtop.supervisor.monitor.values import GpuTrouble, Job
from memtop.tui.app import DashboardApp
from memtop.tui.choices import Choices
from memtop.tui.dashboard.result import DashboardResult
from memtop.tui.line import cropped, plain, wrap
from memtop.tui.machine.gpu_details import draw_gpu_details
from memtop.tui.machine.vram import bar_parts, vram_legend
from memtop.tui.processes.filter import parse
from memtop.tui.processes.kill import describe
from memtop.tui.store import Holder, Store, fold
from memtop.tui.themes import NAMES
from tests.tui.support import (
    GIB,
    NOW,
    RecordingFeed,
    gpu,
    machine,
    opened,
    press,
    process,
    resize,
    run_state,
    running,
    screen_colours,
    screen_text,
    settle,
)

WIDE = "訓練 大規模言語モデル"
NOTE = "no NVIDIA GPU: the NVIDIA driver is not loaded: load it (modprobe nvidia) or reboot after installing it"
TEXTS = ("mem-safe", "mem-edge", "mem-muted", "mem-alloc")


@pytest.mark.parametrize("theme", [name for name in NAMES if not name.startswith("ansi-")])
def test_the_words_of_the_bands_stand_out_from_every_background(theme: str) -> None:
    """The terminal chooses the colours of the two ANSI themes."""
    variables = DashboardApp(RecordingFeed(), choices=Choices({"theme": theme})).get_css_variables()
    for name in TEXTS:
        for background in ("background", "mem-track"):
            assert contrast(Color.parse(variables[name]), Color.parse(variables[background])) > 3.0, (name, background)


@pytest.mark.parametrize("keys", [("h", "question_mark"), ("m",), ("r",)])
async def test_another_theme_repaints_every_open_screen(keys: tuple[str, ...]) -> None:
    """No screen keeps a colour, of its text or its background, that it has in the dark theme."""
    seen: dict[str, list[set[str]]] = {}
    for theme in ("memtop", "textual-light"):
        seen[theme] = []
        async with opened(RecordingFeed(running(gpu(processes=(process(7),)))), *keys) as (app, pilot):
            app.theme = theme
            await settle(pilot)
            seen[theme].append(colours(app))
            while len(app.screen_stack) > 1:
                await press(pilot, "escape")
                seen[theme].append(colours(app))
    assert len(seen["memtop"]) == len(keys) + 1
    for dark, light in zip(seen["memtop"], seen["textual-light"], strict=True):
        assert dark
        assert light
        assert not dark & light


def colours(app: App[DashboardResult]) -> set[str]:
    """The colours on the terminal now: `#c9d1d9` of texts, `on #0d1117` of backgrounds."""
    styles = {style for strip in screen_colours(app) for _, style in strip}
    return {colour for style in styles for colour in re.findall(r"(?:on )?#[0-9a-f]{6}", style)}


def contrast(one: Color, other: Color) -> float:
    """As WCAG counts it."""

    def light(color: Color) -> float:
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    low, high = sorted((light(one), light(other)))
    return (high + 0.05) / (low + 0.05)


# Machado, Oliveira and Fernandes 2009, severity 1: what a colour, as linear red, green and blue,
# becomes for people who see no red, no green or no blue.
MACHADO = {
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
NEAREST = 25.0
"""The least distance of two bands in CIELAB. A distance of 2.3 is just noticeable side by side."""


def seen_with(kind: str, color: Color) -> Color:
    light = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized]
    mixed = [min(1.0, max(0.0, sum(a * b for a, b in zip(row, light, strict=True)))) for row in MACHADO[kind]]
    return Color(*(round(255 * (12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055)) for c in mixed))


def distance(one: Color, other: Color) -> float:
    def lab(color: Color) -> tuple[float, float, float]:
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color.normalized)
        x, y, z = (
            t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116
            for t in (
                (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
                0.2126 * r + 0.7152 * g + 0.0722 * b,
                (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
            )
        )
        return 116 * y - 16, 500 * (x - y), 200 * (y - z)

    return math.dist(lab(one), lab(other))


def confused(theme: str) -> list[tuple[str, str, str]]:
    """The bands that someone can confuse in this theme: the kind of vision and the two colours."""
    variables = DashboardApp(RecordingFeed(), choices=Choices({"theme": theme})).get_css_variables()
    bands = {name: Color.parse(variables[name]) for name in ("mem-safe", "mem-edge", "mem-danger-background", "error")}
    danger = ("mem-danger-background", "error")
    return [
        (kind, one, other)
        for kind in MACHADO
        for one, other in combinations(bands, 2)
        if (one, other) != danger and distance(seen_with(kind, bands[one]), seen_with(kind, bands[other])) < NEAREST
    ]


@pytest.mark.parametrize("theme", ["memtop-colour-blind", "memtop-colour-blind-light"])
def test_the_bands_differ_for_people_who_see_no_red_green_or_blue(theme: str) -> None:
    assert confused(theme) == []
    variables = DashboardApp(RecordingFeed(), choices=Choices({"theme": theme})).get_css_variables()
    for kind in MACHADO:

        def seen(name: str, kind: str = kind) -> Color:
            return seen_with(kind, Color.parse(variables[name]))

        for name in ("mem-safe", "mem-edge", "error"):
            assert contrast(seen(name), seen("background")) > 4.5, (kind, name)
        assert contrast(seen("mem-danger"), seen("mem-danger-background")) >= 4.5, kind
        assert contrast(seen("mem-danger-background"), seen("background")) > 2.5, kind


def test_the_default_theme_would_not_pass_as_safe_for_the_colour_blind() -> None:
    assert confused("memtop-light")


def test_wide_characters_count_for_their_cells() -> None:
    assert cropped("ab", 4) == "ab  "
    assert cell_len(cropped(WIDE, 8)) == 8
    assert cropped(WIDE, 8).endswith("…")
    assert cropped("ab", 0) == ""
    assert all(cell_len(plain(one)) <= 7 for one in wrap(WIDE.replace(" ", ""), 7))
    assert "".join(plain(one) for one in wrap(WIDE.replace(" ", ""), 7)) == WIDE.replace(" ", "")
    rows = [
        describe(Holder(process(7, command=command, user=user), (0,), GIB, GIB), NOW, command_width=12)
        for command, user in ((WIDE, "ada"), ("python train.py --long", WIDE))
    ]
    assert len({cell_len(row) for row in rows}) == 1


async def test_the_rows_of_the_kill_dialog_are_one_line_each_and_the_reason_below() -> None:
    why = "draws on the screen (graphics): ending it may end the desktop session of whoever works at this machine"
    rows = (process(11, command="python " + "x" * 200), process(12, command=WIDE * 9, choosable=False, reason=why))
    async with opened(RecordingFeed(machine(gpu(processes=rows))), size=(80, 24)) as (app, pilot):
        for size in ((80, 24), (120, 40)):
            await resize(pilot, *size)
            await press(pilot, "k")
            text = screen_text(app)
            lines = [one for one in text.splitlines() if " 11 " in one or " 12 " in one]
            (first, second) = [one for one in lines if ("ada" in one and "GiB" in one and "[" in one) or " - " in one][-2:]
            # The columns stand below each other, and the whole reason is shown.
            assert first.rindex("ada") == second.rindex("ada")
            assert "works at this machine" in " ".join(text.replace("│", " ").split())
            await press(pilot, "escape")


def test_no_value_of_the_details_is_cut_off() -> None:
    card = gpu(uuid="GPU-00000001-0000-0000-0000-000000000000")
    store = fold(Store(), machine(card))
    words = "".join("".join(plain(one)) for one in draw_gpu_details(store, card, 80))
    assert "GPU-00000001-0000-0000-0000-000000000000" in words
    both = [plain(one) for one in draw_gpu_details(store, card, 120)]
    (at,) = [n for n, one in enumerate(both) if "UUID" in one]
    assert (both[at][60:] + both[at + 1][60:]).replace(" ", "") == "|UUIDGPU-00000001-0000-0000-0000-000000000000"[1:]


def test_an_unreadable_card_shows_only_its_name_and_the_reason() -> None:
    trouble = GpuTrouble(time=NOW - 5, kind="lost", message="the GPU is lost")
    lost = gpu(error="the GPU is lost: power the machine off and on", troubles=(trouble,), utilization_fraction=None)
    store = fold(fold(Store(), machine(gpu())), machine(lost, time=NOW + 1))
    words = [plain(one) for one in draw_gpu_details(store, lost, 80)]
    assert any("power the machine off" in one for one in words)
    assert any("lost 6 s ago" in one for one in words)
    assert any("GPU-0000-0000" in one for one in words)
    assert any("10.0 GiB" in one for one in words)
    assert not any("utilisation" in one for one in words)


def test_every_mark_in_the_bar_is_in_the_legend() -> None:
    rows = tuple(process(n, job=f"pid {n}", used_bytes=GIB) for n in range(1, 6))
    jobs = tuple(Job(key=f"pid {n}", name=f"training-number-{n}", leader_pid=n, pids=(n,), used_bytes=GIB) for n in range(1, 6))
    card = gpu(processes=rows)
    snapshot = machine(card)
    store = fold(Store(), type(snapshot)(time=NOW, gpus=(card,), jobs=jobs, host=snapshot.host))
    marks = {part.glyph for part in bar_parts(store, card) if part.size}
    assert {"█", "▓", "▒"} < marks
    for width in (40, 56, 78, 120, 200):
        legend = plain(vram_legend(store, card, width))
        assert {"█", "▓", "▒"} <= set(legend), (width, legend)


async def test_the_whole_reason_why_there_is_no_gpu_is_shown() -> None:
    feed = RecordingFeed(machine(note=NOTE))
    async with opened(feed) as (app, pilot):
        for has_run in (False, True):
            assert "after installing it" in " ".join(screen_text(app).replace("│", " ").split())
            # Without a run the panel takes the whole width.
            assert (app.screen.query_one("#host-big").size.width > 100) is not has_run
            feed.send(wire.StateUpdate(run=run_state(), machine=machine(note=NOTE)))
            await settle(pilot)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("vram>", "vram> needs a number"),
        ("vram>>x", "needs a number"),
        ("is:foo", "is:stray, is:gone, is:mine"),
        ("nosuch:1", "cpu, time"),
    ],
)
def test_a_filter_that_cannot_mean_anything_is_refused_in_words(text: str, problem: str) -> None:
    found = parse(text)
    assert isinstance(found, str)
    assert problem in found
    assert found.count("pid") <= 1


async def test_the_keys_of_other_screens_have_a_button_wherever_there_is_room() -> None:
    feed = RecordingFeed(machine(gpu()))
    async with opened(feed, size=(80, 40)) as (app, pilot):

        async def shown_keys(width: int) -> set[str]:
            await resize(pilot, width, 40)
            bar = app.dashboard.action_bar
            assert sum(button.size.width for button in bar.children if button.display) <= width
            return {str(button.id) for button in bar.children if button.display}

        wanted = {"action-history", "action-processes", "action-gpu", "action-host", "action-help"}
        assert wanted <= await shown_keys(80)
        feed.send(running(gpu()))
        assert "action-processes" in await shown_keys(120)
        assert "action-history" in await shown_keys(170)
        assert "action-help" in await shown_keys(80)


async def test_g_and_m_lead_from_the_gpu_to_the_host_and_back() -> None:
    async with opened(RecordingFeed(machine(gpu()))) as (app, pilot):
        for key, wanted in (("g", "GPU 0"), ("m", "Swap and pressure"), ("g", "compute capability"), ("g", "Host memory")):
            await press(pilot, key)
            assert wanted in screen_text(app), key


async def test_a_process_shows_its_share_of_the_card_and_all_of_its_facts() -> None:
    row = process(11, command="python " + "y" * 400, used_bytes=5 * GIB, container="docker 3f2a9c1b7d10")
    async with opened(RecordingFeed(machine(gpu(processes=(row,)))), "o", "enter", size=(80, 24)) as (app, pilot):
        for size in ((80, 24), (120, 40)):
            await resize(pilot, *size)
            text = screen_text(app)
            assert "5.0 GiB, 25.0 % of card" in text
            assert "docker 3f2a9c1b7d10" in text
            assert "stray" in text
            # A command that is cut ends with an ellipsis.
            assert ("y…" in text) is (size == (80, 24))
            assert text.count("y") >= (400 if size != (80, 24) else 60)
