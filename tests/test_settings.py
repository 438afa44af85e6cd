"""Settings: environment, assignment, and the page that lists them."""

from pathlib import Path

import pytest

from pyg_accel.settings import SETTINGS, settings

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
BOOLS = [s.name for s in SETTINGS if isinstance(s.default, bool)]
INTS = [s.name for s in SETTINGS if type(s.default) is int]
TEXTS = [s.name for s in SETTINGS if isinstance(s.default, str)]


@pytest.fixture(autouse=True)
def nothing_assigned():
    """Give back what every test assigns, for this machine's own file not to be read."""
    settings.tuning = None


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_without_anything_the_default_holds(setting):
    assert getattr(settings, setting.name) == setting.default


@pytest.mark.parametrize("name", BOOLS)
def test_switches_are_read_from_the_environment_when_asked_for(name, monkeypatch):
    for text, value in (("1", True), ("0", False), ("true", True), ("Off", False), ("", False),
                        ("YES", True), ("no", False), ("on", True)):  # fmt: skip
        monkeypatch.setenv(f"PYG_ACCEL_{name.upper()}", text)
        assert getattr(settings, name) is value


@pytest.mark.parametrize("name", BOOLS)
@pytest.mark.parametrize("text", ["2", "maybe", "-1", "1.0"])
def test_a_switch_that_is_neither_names_its_variable(name, text, monkeypatch):
    monkeypatch.setenv(f"PYG_ACCEL_{name.upper()}", text)
    with pytest.raises(ValueError, match=f"PYG_ACCEL_{name.upper()} to be 0 or 1 .got '{text}'"):
        getattr(settings, name)


@pytest.mark.parametrize("name", INTS)
def test_numbers_are_read_and_checked(name, monkeypatch):
    monkeypatch.setenv(f"PYG_ACCEL_{name.upper()}", "7")
    assert getattr(settings, name) == 7
    for text in ("-1", "x", "", "1.5"):
        monkeypatch.setenv(f"PYG_ACCEL_{name.upper()}", text)
        with pytest.raises(
            ValueError, match=f"PYG_ACCEL_{name.upper()} to be an integer of at least 0"
        ):
            getattr(settings, name)


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_taken_as_they_are(name, monkeypatch):
    monkeypatch.setenv(f"PYG_ACCEL_{name.upper()}", "some text")
    assert getattr(settings, name) == "some text"
    monkeypatch.delenv(f"PYG_ACCEL_{name.upper()}")
    assert getattr(settings, name) == next(s.default for s in SETTINGS if s.name == name)


def test_an_assignment_outranks_the_environment_until_it_is_taken_back(monkeypatch):
    monkeypatch.setenv("PYG_ACCEL_VERIFY", "1")
    assert settings.verify is True
    settings.verify = False
    assert settings.verify is False
    settings.verify = None
    assert settings.verify is True


@pytest.mark.parametrize(
    ("name", "value"), [("verify", 1), ("verify", "1"), ("graph_cache", True), ("backend", 3)]
)
def test_an_assignment_of_another_type_is_refused(name, value):
    with pytest.raises(ValueError, match=f"expected setting '{name}' to be"):
        setattr(settings, name, value)
    assert getattr(settings, name) == next(s.default for s in SETTINGS if s.name == name)


def test_unknown_settings_list_those_that_exist():
    with pytest.raises(
        AttributeError, match="no setting 'speed'; there are always, atomics, backend"
    ):
        settings.speed  # noqa: B018
    with pytest.raises(AttributeError, match="no setting 'speed'"):
        settings.speed = True


def test_dir_lists_every_setting():
    assert set(dir(settings)) == {setting.name for setting in SETTINGS}


def test_the_page_lists_exactly_these_settings():
    lines = [line for line in PAGE.read_text().splitlines() if line.strip().startswith("|")]
    rows = [
        [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")] for line in lines
    ]
    head, _, *body = rows
    assert head[:4] == ["setting", "variable", "default", "meaning"]
    listed = {row[0]: (row[1], row[2]) for row in body}
    shown = {True: "1", False: "0"}
    expected = {
        s.name: (s.variable, shown[s.default] if isinstance(s.default, bool) else str(s.default))
        for s in SETTINGS
    }
    assert listed == expected
    assert len(body) == len(SETTINGS)
    assert all(row[3] for row in body)


def test_changed_settings_are_listed_by_their_variables(monkeypatch):
    assert settings.changed() == {}
    monkeypatch.setenv("PYG_ACCEL_ALWAYS", "1")
    settings.graph_cache = 3
    assert settings.changed() == {"PYG_ACCEL_ALWAYS": True, "PYG_ACCEL_GRAPH_CACHE": 3}
    monkeypatch.setenv("PYG_ACCEL_VERIFY", "maybe")
    with pytest.raises(ValueError, match="PYG_ACCEL_VERIFY"):
        settings.changed()
