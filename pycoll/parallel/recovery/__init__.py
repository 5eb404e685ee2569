"""Trainings that lose ranks and take new ones: `pc.elastic(build, train)` (docs/elastic.md)."""
