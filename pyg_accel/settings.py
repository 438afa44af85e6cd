"""All settings of pyg_accel.

The value of a setting is the assigned attribute of :data:`settings`, otherwise its environment
variable, which is read at each access (never at import), otherwise its default.
``docs/reference/settings.md`` lists them, and a test compares that page with this file.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

__all__ = ["SETTINGS", "Setting", "settings", "variables"]

# Every call of a layer reads settings, and a miss in os.environ takes ten times as long as in its
# dictionary.
_environment: Any = getattr(os.environ, "_data", os.environ)
_key_of: Any = getattr(os.environ, "encodekey", str)


class Setting:
    """A setting: its names, type, default and description.

    Attributes:
        name: the attribute of :data:`settings`.
        variable: the environment variable.
        default: the default; values have its type.
        help: a line for people.
    """

    def __init__(self, default: bool | int | str, help: str) -> None:
        self.default = default
        self.help = help

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.variable = f"PYG_ACCEL_{name.upper()}"
        self.key = _key_of(self.variable)

    def __get__(self, instance: "Settings | None", owner: type) -> Any:
        if instance is None:
            return self
        if self.name in instance.assigned:
            return instance.assigned[self.name]
        text = _environment.get(self.key)
        return self.default if text is None else self.parse(os.fsdecode(text))

    def __set__(self, instance: "Settings", value: bool | int | str | None) -> None:
        """Override the environment; None removes the override."""
        if value is None:
            instance.assigned.pop(self.name, None)
        elif type(value) is not type(self.default):
            expected = type(self.default).__name__
            raise ValueError(f"expected setting '{self.name}' to be {expected} (got {value!r})")
        else:
            instance.assigned[self.name] = value
        instance.number_state()

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


class Settings:
    """All settings, as attributes; assign to override the environment.

    Example:
        >>> from pyg_accel.settings import settings
        >>> settings.verify
        False
    """

    always = Setting(False, "accelerate whatever can be, whatever its size (tests, experiments)")
    atomics = Setting(
        True, "allow float atomics where faster: last bits of sums vary from run to run"
    )
    backend = Setting("auto", "the only backend to use, by name; `auto` chooses")
    cost_models = Setting("", "a folder of cost models to use in place of the roofline")
    disable = Setting("", "comma-separated names of backends that must not be chosen")
    graph_cache = Setting(64, "number of edge_index tensors whose graphs are stored")
    isa = Setting("", "CPU kernels: `portable`, `avx2` or `avx512`; empty picks the fastest")
    replace_pyg_lib = Setting(
        False, "let patch() give PyG this package's operators also where pyg-lib is installed"
    )
    tuning = Setting(
        "~/.cache/pyg_accel/tuning.json",
        "what `python -m pyg_accel tune` measured on this machine: a JSON file",
    )
    verify = Setting(False, "run PyG's own path beside every call and raise on a difference")

    __slots__ = ("assigned", "changes", "outdated", "states")

    def __init__(self) -> None:
        self.assigned: dict[str, bool | int | str] = {}
        self.outdated = 0  # number of changes of backends or their dependencies
        self.states: dict[tuple[Any, ...], int] = {}
        self.number_state()

    def number_state(self) -> None:
        """Number the values of all settings: choices hold where these are the same again."""
        state = self.outdated, *sorted(self.assigned.items())
        self.changes = self.states.setdefault(state, len(self.states))

    def outdate(self) -> None:
        """Forget all choices: something that backends depend on has changed."""
        self.outdated += 1
        self.number_state()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no setting '{name}'; there are {', '.join(dir(self))}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name):
            self.__getattr__(name)
        object.__setattr__(self, name, value)

    def __dir__(self) -> list[str]:
        return [setting.name for setting in SETTINGS]

    def changed(self) -> dict[str, bool | int | str]:
        """Return the values that are no defaults, by environment variable.

        Raises:
            ValueError: naming a variable that holds no value of its setting.
        """
        values = {setting: getattr(self, setting.name) for setting in SETTINGS}
        return {s.variable: value for s, value in values.items() if value != s.default}


def variables(*names: str) -> Callable[[], Iterator[Any]]:
    """Return a function that reads the environment variables of settings as text."""
    return partial(map, _environment.get, [getattr(Settings, name).key for name in names])


SETTINGS = tuple(setting for setting in vars(Settings).values() if isinstance(setting, Setting))
settings = Settings()
