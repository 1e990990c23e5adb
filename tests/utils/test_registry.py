"""Registries: a value by its name, and an error with all known names."""

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


def test_a_value_is_found_by_its_name(registry: Registry[type]) -> None:
    assert (registry["dog"], registry["cat"]) == (int, str)


def test_names_are_sorted(registry: Registry[type]) -> None:
    assert registry.names == ["cat", "dog"]


def test_the_decorator_returns_its_argument(registry: Registry[type]) -> None:
    @registry.register("fish")
    class Fish:
        pass

    assert registry["fish"] is Fish
    assert Fish.__name__ == "Fish"


def test_an_unknown_name_is_an_error_with_all_known_names(registry: Registry[type]) -> None:
    with pytest.raises(ConfigError, match="unknown animal 'cow'; there is cat, dog"):
        registry["cow"]


def test_a_name_is_taken_once(registry: Registry[type]) -> None:
    with pytest.raises(AssertionError):
        registry.register("dog")(float)
    assert registry["dog"] is int
