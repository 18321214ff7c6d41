"""Comparing numbers under the contract's rule."""
