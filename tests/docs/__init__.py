"""Tests of what is written: commands run, links lead somewhere, every error has its entry."""
