"""How large numbers may be, so that no sum of theirs in float32, which ends at 2^128, overflows."""

GRADIENT_LIMIT = 2.0**64  # a gradient's elements lie below: velocity and residual may grow by 2^32
FRAME_LIMIT = 2.0**96  # numbers in frames lie below: the sums over ranks, and a server's error, may grow by 2^32
