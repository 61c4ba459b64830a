"""The themes that memtop ships, and the colours of memory in each theme."""

from __future__ import annotations

from textual.theme import BUILTIN_THEMES, Theme

_DARK = Theme(
    name="memtop",
    primary="#6cb6ff",
    secondary="#8ddb8c",
    accent="#6cb6ff",
    foreground="#cdd9e5",
    background="#12171d",
    surface="#171d24",
    panel="#222a33",
    success="#6bc2a1",
    warning="#f2d45c",
    error="#ff7b72",
    dark=True,
    variables={"footer-key-foreground": "#6cb6ff", "input-selection-background": "#6cb6ff 35%"},
)
_LIGHT = Theme(
    name="memtop-light",
    primary="#1f5fa8",
    secondary="#2f6d3a",
    accent="#1f5fa8",
    foreground="#1d252e",
    background="#f7f9fb",
    surface="#eef1f5",
    panel="#dfe4ea",
    success="#17654a",
    warning="#855300",
    error="#b3261e",
    dark=False,
    variables={"footer-key-foreground": "#1f5fa8", "input-selection-background": "#1f5fa8 35%"},
)
# Safe is blue, edge yellow and danger a red that differs from yellow in its lightness: these stay
# apart for people who see no red, no green or no blue.
_COLOUR_BLIND = Theme(
    name="memtop-colour-blind",
    primary="#6cb6ff",
    secondary="#b9c7d6",
    accent="#6cb6ff",
    foreground="#cdd9e5",
    background="#12171d",
    surface="#171d24",
    panel="#222a33",
    success="#5aa9ee",
    warning="#fbea80",
    error="#f0702a",
    dark=True,
    variables={"footer-key-foreground": "#6cb6ff", "input-selection-background": "#6cb6ff 35%"},
)
_COLOUR_BLIND_LIGHT = Theme(
    name="memtop-colour-blind-light",
    primary="#1a55a0",
    secondary="#4a5560",
    accent="#1a55a0",
    foreground="#1d252e",
    background="#fafbfc",
    surface="#f0f3f6",
    panel="#e0e5ea",
    success="#1a6ac2",
    warning="#985f00",
    error="#78090f",
    dark=False,
    variables={"footer-key-foreground": "#1a55a0", "input-selection-background": "#1a55a0 35%"},
)
OWN = (_DARK, _LIGHT, _COLOUR_BLIND, _COLOUR_BLIND_LIGHT)
NAMES = (*(theme.name for theme in OWN), *BUILTIN_THEMES)
"""Every theme that can be chosen, memtop's own first."""

# From safe to danger the colours get lighter, so that grey terminals keep the order.
_DARK_MEMORY = {
    "mem-safe": "#4fa58a",
    "mem-edge": "#f2d45c",
    "mem-danger": "#ffffff",
    "mem-danger-background": "#b3261e",
    "mem-alloc": "#4c8fd6",
    "mem-cache": "#7db4e8",
    "mem-context": "#9a8fd0",
    "mem-library": "#6f7fbf",
    "mem-other": "#8b949e",
    "mem-track": "#232c36",
    "mem-line": "#4a5663",
    "mem-muted": "#8896a5",
}
# On a light background they get darker from safe to danger.
_LIGHT_MEMORY = {
    "mem-safe": "#17654a",
    "mem-edge": "#855300",
    "mem-danger": "#ffffff",
    "mem-danger-background": "#b3261e",
    "mem-alloc": "#2f6fb3",
    "mem-cache": "#5c97d0",
    "mem-context": "#7a6cc0",
    "mem-library": "#54629e",
    "mem-other": "#6b7480",
    "mem-track": "#c6ccd3",
    "mem-line": "#8b96a1",
    "mem-muted": "#525c66",
}
_OTHER_BANDS = {
    _COLOUR_BLIND.name: {"mem-safe": "#3f8fd9", "mem-edge": "#fbea80", "mem-danger-background": "#b8430a"},
    _COLOUR_BLIND_LIGHT.name: {
        "mem-safe": "#1a6ac2",
        "mem-edge": "#985f00",
        "mem-danger-background": "#6e0f14",
        "mem-track": "#e1e6eb",
    },
}


def memory_colours(theme: Theme) -> dict[str, str]:
    """The colours of memory in this theme, by the name of their variable."""
    return (_DARK_MEMORY if theme.dark else _LIGHT_MEMORY) | _OTHER_BANDS.get(theme.name, {})
