"""Experiments before they run: which factors, which combinations of their levels, and what those can tell."""
