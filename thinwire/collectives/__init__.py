"""How the ranks' payloads become one mean: one file per topology."""

from thinwire.collectives.allgather import AllGather
from thinwire.collectives.blocksign_server import BlockSignServer
from thinwire.collectives.global_topk import GlobalTopK
from thinwire.collectives.ternary_server import TernaryServer
from thinwire.collectives.vote_server import VoteServer

__all__ = ["AllGather", "BlockSignServer", "GlobalTopK", "TernaryServer", "VoteServer"]
