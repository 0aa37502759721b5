"""The papers' own settings as method strings, for whoever compares with them; the defaults are ours.

docs/design.md, "Defaults and why", has what was measured of both.
"""

PAPER_DGC = "dgc:density=0.001,scope=tensor,values=fp32,factor_masking=true"
PAPER_GTOPK = "gtopk:density=0.001,momentum_correction=false"
PAPER_TERNGRAD = "terngrad:dense_below=0"  # with exclude=... for the output layer where the paper leaves it float
PAPER_BLOCKSIGN = "blocksign:dense_below=0"  # everything is compressed
