"""Presets and recipes: data files, their schema, and the arithmetic of batches. Imports nothing else of memtop."""

from memtop.presets.checking import SettingsError
from memtop.presets.choosing import choose_by_memory
from memtop.presets.comparing import compatibility
from memtop.presets.editing import edit_settings, resolve
from memtop.presets.loading import PresetFileError, load_presets, load_recipes, presets_for
from memtop.presets.schema import Preset, Recipe, Settings
from memtop.presets.strategies import apply_preset, take_whole

__all__ = [
    "Preset",
    "PresetFileError",
    "Recipe",
    "Settings",
    "SettingsError",
    "apply_preset",
    "choose_by_memory",
    "compatibility",
    "edit_settings",
    "load_presets",
    "load_recipes",
    "presets_for",
    "resolve",
    "take_whole",
]
