"""How a run is to be done."""

from __future__ import annotations

import dataclasses

ROUNDS = 25
QUICK_ROUNDS = 7
FEWEST_ROUNDS = 5

# For the rounds of one measure, so that a busy machine cannot stretch a run without end.
SECONDS = 6.0
QUICK_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What every measure is told.

    Attributes:
        rounds: of interleaved timings.
        seconds: after which a measure starts no further round, once it has a few.
        threads: of torch.
        quick: leave out what only informs, and what must be compiled first.
    """

    rounds: int = ROUNDS
    seconds: float = SECONDS
    threads: int = 2
    quick: bool = False

    def for_information(self) -> Settings:
        """Less of it, for numbers without a floor."""
        return dataclasses.replace(self, rounds=max(self.rounds // 2, 1), seconds=self.seconds / 2)


# How memory is handed out; `Row.mode`.
OUT = "out="
POOLED = "pooled"
PLAIN = "plain"
