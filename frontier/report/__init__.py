"""RESULTS.md and the README's tables, from records."""
