"""JOIN: pure. No clock, no I/O, no async: ``step(state, readings) -> (state, view)``."""
