"""Blocks of a page as HTML."""

import pytest

from amp_engine.tools.page.page import Page, Section, Sentence


@pytest.mark.parametrize(
    ("sentence", "html"),
    [
        (Sentence("a & b"), "<p>a &amp; b</p>"),
        (Sentence("a", "soft"), '<p class="soft">a</p>'),
        (Sentence("a", link="https://b.c"), '<p>a <a href="https://b.c">https://b.c</a></p>'),
    ],
)
def test_a_sentence_has_its_kind_and_its_link(sentence: Sentence, html: str) -> None:
    assert html in Page("", [Section("", [sentence])]).html()
