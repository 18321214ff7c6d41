"""Rows in and out: made from a seed, read from and written to files, hashed and watched."""
