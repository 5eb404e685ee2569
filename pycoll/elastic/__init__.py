"""Worlds that lose ranks and take newcomers (docs/elastic.md)."""
