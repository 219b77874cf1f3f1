"""``tokengap chaos``: break it on purpose, and prove what the clients saw.

A steady state, a baseline, a fault, a recovery; the fault proves that it was there and that it is gone; then clients'
truth is laid beside what was promised, and beside what the exporter says.
"""
