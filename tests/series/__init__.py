"""Tests of the names: what is on the page."""
