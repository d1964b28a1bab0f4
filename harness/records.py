"""The records of a run: frozen dataclasses, written as strict JSONL while the run goes on.

Console, HTML and JUnit are views of these records and compute nothing of their own. A number that does not exist is
``null`` with a reason beside it, never NaN. ``stage`` is always the full name (``layers.2.attn_core``, ``hc_head``) and
``layer`` an int or null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar


class Verdict(StrEnum):
    """What can be said of one comparison, or of a run."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    INVALID = "INVALID"
    SKIPPED = "SKIPPED"


@dataclass(frozen=True)
class Coordinate:
    """One element, with what every witness says of it. ``bound`` is what rule 3 allows there (local rows)."""

    index: tuple[int, ...]
    #: null: the value does not exist or is not finite (the tensor's reason says so)
    production: float | int | bool | None
    reference: float | int | bool | None
    oracle: float | int | bool | None
    bound: float | None
    ratio: float | None  # |production - oracle| / bound


@dataclass(frozen=True)
class Slice:
    """The error along one named axis (head, expert, position, channel, stream ...), in multiples of the bound."""

    dim: str
    #: worst ratio per bucket; a long axis is cut into at most 32 buckets of ``width`` consecutive indices
    worst: tuple[float | None, ...]
    #: RMS error of the bucket over RMS of the oracle there
    relative: tuple[float | None, ...]
    width: int


@dataclass(frozen=True)
class Histogram:
    """Counts over equal bins of [low, high]."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Density:
    """Reference (columns) against production (rows) values, counts over a square grid over [low, high]."""

    low: float
    high: float
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TensorComparison:
    """One output tensor of a comparison."""

    tensor: str  # output name
    wire: str
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    role: str
    production_dtype: str
    reference_dtype: str
    verdict: Verdict
    reason: str | None = None  # why it is not PASS, in words
    #: worst element over its bound (rule 3); null for exact outputs and free rows
    margin: float | None = None
    #: RMS(production - oracle) over what rule 4 (local) or rule 6 (free) allows
    cost: float | None = None
    rms_oracle: float | None = None
    rms_error: float | None = None  # RMS(production - oracle)
    rms_reference_error: float | None = None  # RMS(reference - oracle)
    slope: float | None = None  # least-squares production = slope * oracle
    mismatches: int | None = None  # exact outputs; picks outside their bound
    flips: int | None = None  # picks that differ from the oracle's but lie inside the bound
    #: worst elements, worst first (at most 8)
    worst: tuple[Coordinate, ...] = ()
    slices: tuple[Slice, ...] = ()
    errors: Histogram | None = None  # signed (production - oracle) in units of the bound (local) or of RMS error
    density: Density | None = None
    #: per token [B * S]: worst ratio (local) or relative error (free), in at most 256 buckets of ``token_width`` tokens
    tokens: tuple[float | None, ...] = ()
    token_width: int = 1
    formula: str | None = None  # the threshold's formula
    threshold: Mapping[str, float | str | None] = field(default_factory=dict)  # its inputs: lambda, plan, kappa ...


@dataclass(frozen=True)
class Entropy:
    """Attention (or router, or logits) entropy, per head, averaged over the positions where it is defined (nats)."""

    production: tuple[float | None, ...]
    reference: tuple[float | None, ...]
    uniform: float | None  # mean ln(visible keys)
    sink_production: tuple[float | None, ...] = ()
    sink_reference: tuple[float | None, ...] = ()
    collapsed_heads: tuple[int, ...] = ()  # heads within 1 % of uniform in production but not in the reference


@dataclass(frozen=True)
class Cause:
    """What may be wrong with a failing stage. ``explains``: 1 - RMS error left / RMS error, null where nothing does."""

    id: str
    status: str  # confirmed | suspected | unexplained
    explains: float | None
    text: str

    @property
    def line(self) -> str:
        """The cause as one phrase."""
        share = "" if self.explains is None else f", explains {100 * self.explains:.1f} %"
        return f"{self.text} ({self.status}{share})"


@dataclass(frozen=True)
class Comparison:
    """One stage in one mode: the verdict, and the worst tensor's figures on top of its tensors."""

    kind: ClassVar[str] = "comparison"
    stage: str
    layer: int | None
    mode: str  # local | free
    verdict: Verdict
    reason: str | None
    tensor: str | None  # the tensor that decides
    margin: float | None
    cost: float | None
    worst: Coordinate | None
    covers: tuple[str, ...]
    component: str
    plan: Mapping[str, str]
    bypass: str  # production | reference | direct
    replaced: str | None  # path.py:function, where --replace put a user's function
    tensors: tuple[TensorComparison, ...]
    entropy: Entropy | None = None
    #: RMS of the residual streams, where the stage returns them
    stream_rms: Mapping[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    reproduce: str = ""
    causes: tuple[Cause, ...] = ()  # ranked, at most 5; only of rows that were diagnosed


@dataclass(frozen=True)
class Config:
    """The first record: what was asked for and what it ran on."""

    kind: ClassVar[str] = "config"
    command: str
    case: str
    checkpoint: str
    layers: tuple[int, ...]
    modes: tuple[str, ...]
    dtype: str
    batch: int
    length: int
    tokens: tuple[str, ...]  # as text where a tokenizer is there (row 0, at most 1024)
    bypass: Mapping[str, str]
    replace: Mapping[str, str]
    direct_residual: bool
    stages_reference: tuple[str, ...]
    stages_production: tuple[str, ...]
    provenance: Mapping[str, str]
    phase: str = ""  # the cut into calls whose last one is compared; empty: one whole prompt without caches
    planned: int = 0  # comparison rows that the run will yield if nothing stops it
    schema: int = 1


@dataclass(frozen=True)
class Certification:
    """Whether the reference side is the unmodified model (one per check)."""

    kind: ClassVar[str] = "certification"
    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Weights:
    """The weights audit of one parameter: as production will use it against the reference's own decode."""

    kind: ClassVar[str] = "weights"
    stage: str
    layer: int | None
    parameter: str
    verdict: Verdict
    reason: str | None
    shape: tuple[int, ...]
    mismatches: int
    worst: Coordinate | None
    slope: float | None  # one factor that explains it (a dropped or folded scale), else null


@dataclass(frozen=True)
class Skip:
    """A stage that was not compared in some mode, and why."""

    kind: ClassVar[str] = "skip"
    stage: str
    layer: int | None
    mode: str
    reason: str


@dataclass(frozen=True)
class Routing:
    """Router flips against their margin in one layer: where production's picks differ from the oracle's."""

    kind: ClassVar[str] = "routing"
    stage: str
    layer: int | None
    mode: str
    rows: int
    flips: int
    outside: int
    #: (token index, score gap, bound) of at most 64 flips
    examples: tuple[tuple[int, float, float], ...]
    load: tuple[int, ...] = ()  # tokens per expert in production
    entropy: float | None = None  # mean entropy of a token's weights over its picks, normalised (nats)
    entropy_reference: float | None = None


@dataclass(frozen=True)
class Logits:
    """Model output, production (free) against reference: entropy, KL and top-1 agreement (means over positions)."""

    kind: ClassVar[str] = "logits"
    entropy_production: float | None
    entropy_reference: float | None
    kl: float | None
    top1_agreement: float | None
    positions: int


@dataclass(frozen=True)
class Step:
    """One step of a generation: what both sides make of the same past. Figures are of the step's last token."""

    kind: ClassVar[str] = "step"
    step: int  # 0 continues the prompt
    position: int  # of the token that is chosen
    token: str  # what both sides go on with, as text (empty where each follows its own)
    production: str | None  # what each side would say here
    reference: str | None
    agree: bool | None
    verdict: Verdict
    reason: str | None = None
    kl: float | None = None  # KL(reference || production) of the logits, nats
    entropy_production: float | None = None
    entropy_reference: float | None = None
    #: RMS error of the logits against the oracle, and what the free rule allows
    error: float | None = None
    error_reference: float | None = None
    allowed: float | None = None
    #: where the sides disagree: the oracle's logit of the reference's choice minus that of production's
    gap: float | None = None
    attention_production: tuple[float | None, ...] = ()  # mean over heads, by layer, nats
    attention_reference: tuple[float | None, ...] = ()
    divergence: tuple[float | None, ...] = ()  # by layer: RMS distance of the streams over the reference's RMS
    router_flips: int = 0  # picks that production would have made otherwise
    index_flips: int = 0
    flip_margin: float | None = None  # the largest gap of a router flip over its bound


@dataclass(frozen=True)
class FirstFault:
    """The stage to look at."""

    stage: str
    mode: str
    verdict: Verdict
    margin: float | None = None
    cost: float | None = None
    tensor: str | None = None
    reason: str | None = None
    cause: Cause | None = None  # the likeliest


@dataclass(frozen=True)
class Summary:
    """The last record."""

    kind: ClassVar[str] = "summary"
    verdict: Verdict
    counts: Mapping[str, int]
    first_fault: FirstFault | None
    exit_code: int
    interrupted: bool
    reason: str | None
    seconds: Mapping[str, float]  # by phase: import, load, reference, oracle, local, free, total
    peak_rss_bytes: int
    line: str  # the console's last line


Record = Config | Certification | Weights | Comparison | Skip | Routing | Logits | Step | Summary
