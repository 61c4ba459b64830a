"""Settings of training runs: presets and recipes (data files), edits, checks and comparisons.

Imports nothing else of memtop.
"""

from memtop.presets.checks import SettingsError
from memtop.presets.choosing import choose_preset
from memtop.presets.comparison import compatibility
from memtop.presets.edits import apply_preset, edit_settings, resolve, take_whole
from memtop.presets.files import PresetFileError, load_presets, load_recipes, presets_for, user_cache
from memtop.presets.schema import Preset, Recipe, Settings

__all__ = [
    "Preset",
    "PresetFileError",
    "Recipe",
    "Settings",
    "SettingsError",
    "apply_preset",
    "choose_preset",
    "compatibility",
    "edit_settings",
    "load_presets",
    "load_recipes",
    "presets_for",
    "resolve",
    "take_whole",
    "user_cache",
]
