"""How the ranks' payloads become one mean: one file a topology."""

from thinwire.collectives.allgather import AllGather
from thinwire.collectives.global_topk import GlobalTopK
from thinwire.collectives.server import BlockSignServer, TernaryServer, VoteServer

__all__ = ["AllGather", "BlockSignServer", "GlobalTopK", "TernaryServer", "VoteServer"]
