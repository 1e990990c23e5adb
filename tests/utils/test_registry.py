"""Registries: names in, things out, and an error that says what there is."""

from __future__ import annotations

import pytest

from minisgl.errors import ConfigError
from minisgl.utils import Registry


@pytest.fixture
def registry() -> Registry[type]:
    registry: Registry[type] = Registry("animal")
    registry.register("dog")(int)
    registry.register("cat")(str)
    return registry


def test_a_thing_is_found_by_its_name(registry: Registry[type]) -> None:
    assert (registry["dog"], registry["cat"]) == (int, str)


def test_names_are_sorted(registry: Registry[type]) -> None:
    assert registry.names == ["cat", "dog"]


def test_the_decorator_gives_its_thing_back(registry: Registry[type]) -> None:
    @registry.register("fish")
    class Fish:
        pass

    assert registry["fish"] is Fish
    assert Fish.__name__ == "Fish"


def test_an_unknown_name_is_told_what_there_is(registry: Registry[type]) -> None:
    with pytest.raises(ConfigError, match="unknown animal 'cow'; there is cat, dog"):
        registry["cow"]


def test_a_name_is_taken_once(registry: Registry[type]) -> None:
    with pytest.raises(AssertionError):
        registry.register("dog")(float)
    assert registry["dog"] is int
