"""What a step costs: the papers' own models, and ours.

``papers`` has the formulas as they are printed, ``plans`` what a step puts on a link, ``steps`` the time of a training
step from measured speeds.
"""

from thinwire.advisor.cost.papers import (
    PaperCluster,
    density_after,
    gtopk_dense_s,
    gtopk_gtopk_s,
    gtopk_topk_s,
    sparse_all_reduce_s,
    speedup_over_one_node,
    strong_scaling_s,
    strong_throughput,
    ternary_bits,
    weak_scaling_s,
    weak_throughput,
)
from thinwire.advisor.cost.plans import bucket_layouts, plan_exchange
from thinwire.advisor.cost.steps import ExchangeCost, Prediction, TimedBucket, Workload, predict, schedule
from thinwire.engine.traffic_plan import Plan

__all__ = [
    "ExchangeCost",
    "PaperCluster",
    "Plan",
    "Prediction",
    "TimedBucket",
    "Workload",
    "bucket_layouts",
    "density_after",
    "gtopk_dense_s",
    "gtopk_gtopk_s",
    "gtopk_topk_s",
    "plan_exchange",
    "predict",
    "schedule",
    "sparse_all_reduce_s",
    "speedup_over_one_node",
    "strong_scaling_s",
    "strong_throughput",
    "ternary_bits",
    "weak_scaling_s",
    "weak_throughput",
]
