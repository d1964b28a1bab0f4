"""Known mistakes as functions that change a stage of the oracle; none of them reads production's code.

A fault is named by the hypothesis whose stage gives what production gave. The ids are those of the fault catalogue.
"""

from reference.hypotheses import attention, hyper, rotary, weights
from reference.hypotheses.base import Hypothesis, Scene, Tensors, Variant

CATALOGUE: tuple[Hypothesis, ...] = (*weights.ALL, *attention.ALL, *hyper.ALL, *rotary.ALL)

__all__ = ["CATALOGUE", "Hypothesis", "Scene", "Tensors", "Variant"]
