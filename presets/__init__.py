"""Presets and recipes: data files, their schema, and the arithmetic of batches. Imports nothing else of memtop."""

from memtop.presets.editing import SettingsError, apply_preset, edit_settings, resolve
from memtop.presets.loading import PresetFileError, load_presets, load_recipes
from memtop.presets.schema import Preset, Recipe, Settings

__all__ = [
    "Preset",
    "PresetFileError",
    "Recipe",
    "Settings",
    "SettingsError",
    "apply_preset",
    "edit_settings",
    "load_presets",
    "load_recipes",
    "resolve",
]
