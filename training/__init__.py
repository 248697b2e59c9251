"""Trains the miniature checkpoint; not part of the installed package."""
