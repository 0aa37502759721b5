"""What the adviser may compare, recommend and say of a method."""

from __future__ import annotations

from dataclasses import dataclass

UNMEASURED = "nobody measured the accuracy"


@dataclass(frozen=True, kw_only=True)
class Advised:
    """The adviser's view of a method; by default it is predicted when asked for by name, and not compared otherwise.

    sgd, other                  the settings that are compared for torch.optim.SGD, and for other optimizers
    why_not_sgd, why_not_other  why nothing is compared there
    rank                        of equally fast methods the lowest rank is recommended: it lost less accuracy
    suits                       the models with which ``other`` was trained
    wants                       what a recommendation adds; {} stands for the method's name
    """

    sgd: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    why_not_sgd: str = UNMEASURED
    why_not_other: str = UNMEASURED
    rank: int = 100
    suits: str = ""
    wants: str = ""

    def settings(self, optimizer_is_sgd: bool) -> tuple[str, ...]:
        return self.sgd if optimizer_is_sgd else self.other

    def why_not(self, optimizer_is_sgd: bool) -> str:
        return self.why_not_sgd if optimizer_is_sgd else self.why_not_other


WARMUP = "give it a warm-up of a few epochs' steps ({}:warmup=STEPS)"
EXCLUDE = "leave the output layer out ({}:exclude=PATTERN)"
