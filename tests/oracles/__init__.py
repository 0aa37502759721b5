"""NumPy simulations of N workers, written line by line from the papers: the specification of the engine.

Nothing here imports thinwire except `real.py`, which runs the same problem through real processes. All
arithmetic is float64 apart from the comparisons whose outcome float32 rounding decides (TernGrad's coin).
"""
