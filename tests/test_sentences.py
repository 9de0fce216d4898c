"""Every sentence of the vendors' documents names a test that exists or a deviation that is listed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "deviations"))
import sentences_table

TESTS = Path(__file__).parent
DOCUMENTS = sentences_table.documents()
HOLDERS = sorted({holder for document in DOCUMENTS for _, _, *holders in document["sentences"] for holder in holders})


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_holds_a_sentence_exists(holder):
    if holder.startswith("deviation "):
        dialect, _, name = holder.removeprefix("deviation ").partition(": ")
        assert name in sentences_table.deviations()[dialect]
        return
    file, _, function = holder.partition("::")
    assert f"def {function}(" in (TESTS / file).read_text(encoding="utf-8")


def test_every_sentence_is_held_and_stands_once():
    assert len(DOCUMENTS) == 5
    for document in DOCUMENTS:
        said = [(section, words) for section, words, *holders in document["sentences"] if holders]
        assert len(said) == len(document["sentences"]) == len(set(said))


def test_the_page_is_current():
    assert sentences_table.PAGE.read_text(encoding="utf-8") == sentences_table.page(), \
        "run python tests/deviations/sentences_table.py"
