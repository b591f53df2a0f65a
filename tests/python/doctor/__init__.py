"""Tests of `kvik doctor`."""
