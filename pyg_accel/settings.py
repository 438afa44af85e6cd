"""Every switch of pyg_accel, in one place.

A setting comes from the attribute of :data:`settings` if it was assigned, otherwise from its
environment variable, which is read when it is asked for (never at import), otherwise from its
default. ``docs/reference/settings.md`` lists them, and a test holds that page against this file.
"""

import os
from dataclasses import dataclass
from typing import Any

__all__ = ["SETTINGS", "Setting", "settings"]


@dataclass(frozen=True)
class Setting:
    """One switch: where it is read from, its type and default, and what it does."""

    name: str
    default: bool | int | str
    help: str

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"PYG_ACCEL_{self.name.upper()}"

    def parse(self, text: str) -> bool | int | str:
        """Convert the text of the environment variable, or raise a ValueError that names it."""
        if isinstance(self.default, bool):
            if text.lower() in {"1", "true", "yes", "on"}:
                return True
            if text.lower() in {"", "0", "false", "no", "off"}:
                return False
            raise ValueError(f"expected {self.variable} to be 0 or 1 (got {text!r})")
        if isinstance(self.default, int):
            try:
                value = int(text)
            except ValueError:
                value = -1
            if value < 0:
                raise ValueError(
                    f"expected {self.variable} to be an integer of at least 0 (got {text!r})"
                )
            return value
        return text


SETTINGS = (
    Setting("always", False, "accelerate whatever can be, whatever its size (tests, experiments)"),
    Setting(
        "atomics", True, "allow float atomics where faster: last bits of sums vary from run to run"
    ),
    Setting("backend", "auto", "the only backend to use, by name; `auto` chooses"),
    Setting("cost_models", "", "a folder of cost models to use before the shipped ones"),
    Setting("disable", "", "comma-separated names of backends that must not be chosen"),
    Setting("graph_cache", 64, "how many graphs are kept, each only while its edge_index lives"),
    Setting("isa", "", "CPU kernels: `portable`, `avx2` or `avx512`; empty picks the fastest"),
    Setting("packed", False, "MaxK sums on a GPU read float32 in 24 bits: faster, off by 2^-16"),
    Setting("thresholds", "", "a JSON file of size thresholds in place of the measured one"),
    Setting("verify", False, "run PyG's own path beside every call and raise on a difference"),
)


class Settings:
    """Attribute access to :data:`SETTINGS`; assign to override the environment.

    Example:
        >>> from pyg_accel.settings import settings
        >>> settings.verify
        False
    """

    def __init__(self) -> None:
        object.__setattr__(self, "_known", {setting.name: setting for setting in SETTINGS})
        object.__setattr__(self, "_variables", {s.name: s.variable for s in SETTINGS})
        object.__setattr__(self, "_assigned", {})

    def __getattr__(self, name: str) -> Any:
        if name in self._assigned:
            return self._assigned[name]
        text = os.environ.get(self._variables.get(name, ""))
        setting = self._find(name)
        return setting.default if text is None else setting.parse(text)

    def __setattr__(self, name: str, value: bool | int | str | None) -> None:
        """Override a setting; None gives it back to the environment."""
        setting = self._find(name)
        if value is None:
            self._assigned.pop(name, None)
            return
        if type(value) is not type(setting.default):
            raise ValueError(
                f"expected setting '{name}' to be {type(setting.default).__name__} (got {value!r})"
            )
        self._assigned[name] = value

    def __dir__(self) -> list[str]:
        return list(self._known)

    def _find(self, name: str) -> Setting:
        if name not in self._known:
            raise AttributeError(f"no setting '{name}'; there are {', '.join(self._known)}")
        found: Setting = self._known[name]
        return found


settings = Settings()
