"""The site's links: pages of the repository lead to pages of the site, sources keep their text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from docs.site_hooks import on_page_markdown, sections_of


def rendered(markdown: str, page: str) -> str:
    return on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri=page)))


@pytest.mark.parametrize(
    ("page", "text", "on_site"),
    [
        ("index.md", "[data](docs/data.md#chats)", "[data](data.md#chats)"),
        ("index.md", "[rules](CONTRIBUTING.md)", "[rules](CONTRIBUTING.md)"),
        ("data.md", "[readme](../README.md)", "[readme](index.md)"),
        ("data.md", "[a test](../tests/conftest.py)", "a test"),
        ("data.md", "[here](#chats)", "[here](#chats)"),
        ("data.md", "[there](https://example.org/x.md)", "[there](https://example.org/x.md)"),
        ("data.md", "[lost](../tests/nowhere.py)", "[lost](../tests/nowhere.py)"),
        ("conformance/devices.md", "[kit](../data.md)", "[kit](../data.md)"),
        ("data.md", "```yaml run-file\n[a](../README.md)\n```", "```yaml\n[a](../README.md)\n```"),
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, text: str, on_site: str) -> None:
    assert rendered(text, page) == on_site


def test_the_order_of_pages_is_the_readmes() -> None:
    train = "\n- **Train**: [a](docs/a.md),\n  [b](docs/b.md) ([measured](docs/c.md))"
    text = f"{train}\n- **More**: [d](SECURITY.md)\n\nSee also [e](LICENSE)."
    assert sections_of(text) == [{"Train": ["a.md", "b.md", "c.md"]}, {"More": ["SECURITY.md"]}]
