"""Every error of the tree becomes a miss with a reason of its own, and bad arguments do not."""

from __future__ import annotations

import pickle

import pytest

from polarkv_client import client, errors
from polarkv_client.results import Reason


def tree(kind: type[errors.PolarKVError] = errors.PolarKVError) -> list[type[errors.PolarKVError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in tree(child))]


OWN = sorted({kind for kind in tree() if kind.__module__ == errors.__name__}, key=lambda kind: kind.__name__)


def made(kind: type[errors.PolarKVError]) -> errors.PolarKVError:
    return kind("field", 1, "fix") if issubclass(kind, errors.ConfigurationError) else kind("text")


def test_the_picture_of_the_tree_is_complete() -> None:
    assert errors.__doc__ is not None
    assert [kind.__name__ for kind in OWN if kind.__name__ not in errors.__doc__] == []


@pytest.mark.parametrize("kind", OWN)
def test_every_class_has_a_reason(kind: type[errors.PolarKVError]) -> None:
    reason = client.reason_of(made(kind))
    assert kind in client.REASONS
    assert (reason is Reason.INTERNAL) == (kind is errors.PolarKVError)


def test_no_two_classes_share_a_reason() -> None:
    reasons = [client.reason_of(made(kind)) for kind in OWN]
    assert len(set(reasons)) == len(reasons)


@pytest.mark.parametrize("kind", [OSError, RuntimeError, ValueError, KeyError, MemoryError, AssertionError])
def test_what_is_not_the_projects_own_is_a_defect_and_still_a_miss(kind: type[Exception]) -> None:
    assert client.reason_of(kind("x")) is Reason.INTERNAL


def test_a_new_subclass_inherits_its_parents_reason() -> None:
    class Stalled(errors.Unavailable):
        pass

    assert client.reason_of(Stalled("x")) is Reason.UNAVAILABLE


@pytest.mark.parametrize("kind", OWN)
def test_every_error_comes_back_from_another_process(kind: type[errors.PolarKVError]) -> None:
    before = made(kind)
    after = pickle.loads(pickle.dumps(before))
    assert (type(after), str(after), vars(after)) == (kind, str(before), vars(before))


def test_a_configuration_error_names_field_value_and_fix() -> None:
    error = errors.ConfigurationError("deadline_ms", -1, "use a positive number")
    assert str(error) == "deadline_ms=-1: use a positive number"
    assert (error.field, error.value, error.fix) == ("deadline_ms", -1, "use a positive number")
