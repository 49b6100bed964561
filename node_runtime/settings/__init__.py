"""Settings: one YAML file for all processes, environment and flags over it.

Invariant: what load() returns holds only keys that a schema names, each of the right type; every other key, at any
depth and from any source, is refused in one sentence that says where it stood and which known name is nearest.
"""

from node_runtime.settings.load import dump, load, load_for_process
from node_runtime.settings.schema import SECTIONS, Section, SettingKey, SettingsError, schema_keys, schema_sections

__all__ = [
    "SECTIONS",
    "Section",
    "SettingKey",
    "SettingsError",
    "dump",
    "load",
    "load_for_process",
    "schema_keys",
    "schema_sections",
]
