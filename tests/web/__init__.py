"""Tests of what is served."""
