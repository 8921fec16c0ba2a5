"""Every rule of the core is there for a reason: without it, the search finds a history that goes wrong."""

import pytest

from tests.model.mutants import MUTANTS, Mutant
from tests.model.search import search

pytestmark = [pytest.mark.timeout(180)]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_core_without_the_rule_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.patch(monkeypatch)
    result = search(mutant.scope)
    print(f"\n{mutant.name}\n{result}")
    assert result.violation is not None, f"nothing went wrong without the rule: {result}"
    assert mutant.breaks in result.violation, result
