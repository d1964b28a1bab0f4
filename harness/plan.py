"""What will run and what will be compared, from metadata alone: no tensor is touched here.

Both sides are lists of stages that talk over wires. The plan says, for every production stage in reach: which reference
stages it stands for, in which modes it is compared, who computes it (production, the reference, the direct-residual
arithmetic, a user's function), and why it is skipped where it is. Where the two lists disagree, the plan carries the
fault to the stage that it belongs to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness import select
from harness.agree import Graph, disagreement
from harness.types import Bypass, Mode, Stage, UsageError

DIRECT = "direct-residual mode: the stage's own arithmetic is not used"
NEVER = "never produced: no production stage covers it"


@dataclass(frozen=True)
class Request:
    """The user's wishes, as given."""

    layers: str = "all"
    stages: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = ("local", "free")
    bypass: tuple[str, ...] = ()  # GLOB=production|reference|direct, later ones win
    replace: tuple[str, ...] = ()  # GLOB=path.py:function
    direct_residual: bool = False
    backend: tuple[str, ...] = ()  # GLOB=torch|cuda|best, later ones win
    isolate: bool = False  # every production stage in a process of its own
    diagnose: str = "first"  # which local FAILs are explained: first, all or none
    phase: str = ""  # prefill, chunk:SIZES or decode:K: the compared call continues from caches (harness.phase)


@dataclass(frozen=True)
class Step:
    """One production stage (or a reference stage that nothing stands for), in execution order."""

    stage: str
    layer: int | None
    covers: tuple[str, ...]  # in the reference's order
    compared: tuple[Mode, ...]
    free_run: bool  # executed in the free run
    bypass: Bypass = "production"
    replace: str | None = None
    fault: str | None = None  # both sides disagree about this stage: a FAIL that needs no tensor
    produced: bool = True  # False: only the reference has it

    @property
    def skips_local(self) -> str | None:
        """Why the local row is not compared, if it is not."""
        if self.fault or self.bypass == "production":
            return None
        return "bypassed: reference" if self.bypass == "reference" else DIRECT


@dataclass(frozen=True)
class Plan:
    """Everything the engine needs to know before it runs anything."""

    layers: tuple[int, ...]
    modes: tuple[Mode, ...]
    steps: tuple[Step, ...]
    compose: tuple[str, ...]  # reference stages, from the first to the last that is needed
    oracle: tuple[str, ...]  # reference stages that the oracle's free run executes
    direct: tuple[str, ...]  # stages of all sides that use the direct-residual arithmetic
    last_use: Mapping[str, int]  # wire -> index of the last step that reads it in the free run

    @property
    def rows(self) -> int:
        """How many comparison rows the run yields if nothing stops it."""
        return sum(len(step.compared) for step in self.steps)


def make_plan(reference: Sequence[Stage], production: Sequence[Stage], request: Request) -> Plan:
    """The plan of a run; anything the user named that does not exist is a UsageError."""
    _unique(reference, "reference")
    _unique(production, "production")
    graph = Graph.of(reference)
    available = sorted({s.layer for s in reference if s.layer is not None})
    chosen = select.layers(request.layers, available)
    everything = request.layers.strip() == "all"

    scope = _scope(reference, set(chosen), everything)
    covered = {r for p in production for r in p.covers}
    inside = [p for p in production if scope & set(p.covers) or (not graph.covered(p) and p.layer in chosen)]
    lonely = [r for r in reference if r.name in scope and r.name not in covered]
    listed = _merge(inside, lonely, graph.order)
    everywhere = [s.name for s in (*production, *reference)]

    wanted = {stage.name for stage in listed}
    if request.stages:
        wanted = {n for glob in request.stages for n in _select(glob, listed, "--stage", everywhere)}
    bypass, direct = _bypasses(request, listed, [*production, *reference], everywhere)
    replaced = _replacements(request, listed, everywhere, bypass, direct)

    free_run = _needed(inside, wanted) if "free" in request.modes else set()
    steps = tuple(
        Step(
            stage=stage.name,
            layer=stage.layer,
            covers=graph.covered(stage) or tuple(stage.covers),
            compared=request.modes if stage.name in wanted else (),
            free_run=stage.name in free_run,
            bypass="direct" if stage.name in direct else bypass.get(stage.name, "production"),
            replace=replaced.get(stage.name),
            fault=NEVER if stage in lonely else disagreement(stage, graph),
            produced=stage not in lonely,
        )
        for stage in listed
    )
    if not any(step.compared for step in steps):
        raise UsageError("nothing would be compared; choose another --layer, --stage or --mode")
    compose = _composed(reference, steps)
    return Plan(
        layers=chosen,
        modes=request.modes,
        steps=steps,
        compose=compose,
        oracle=_oracle(reference, steps),
        direct=tuple(sorted(direct, key=lambda n: graph.order.get(n, -1))),
        last_use=_last_use(steps, {p.name: p for p in production}, graph.stages),
    )


def _unique(stages: Sequence[Stage], side: str) -> None:
    seen: set[str] = set()
    for stage in stages:
        if stage.name in seen:
            raise UsageError(f"the {side} side lists stage {stage.name!r} twice; names must be unique")
        seen.add(stage.name)


def _scope(reference: Sequence[Stage], layers: set[int], everything: bool) -> set[str]:
    """Reference stages of the run: those of its layers, and the model-scope stages that these read (or all of them)."""
    mine = [s for s in reference if s.layer in layers]
    if everything:
        return {s.name for s in reference}
    reads = {wire for s in mine for wire in s.inputs.values()}
    shared = {s.name for s in reference if s.layer is None and any(o.wire in reads for o in s.outputs)}
    return shared | {s.name for s in mine}


def _merge(production: Sequence[Stage], lonely: Sequence[Stage], order: Mapping[str, int]) -> list[Stage]:
    """Production's order, with every uncovered reference stage before the first stage that comes after it there."""
    listed = list(production)
    for stage in lonely:
        at = next(
            (
                i
                for i, p in enumerate(listed)
                if min((order.get(c, -1) for c in p.covers), default=-1) > order[stage.name]
            ),
            len(listed),
        )
        listed.insert(at, stage)
    return listed


def _select(glob: str, listed: Sequence[Stage], option: str, everywhere: Sequence[str]) -> list[str]:
    """Production stages that a glob means, by their own names or by those of the stages they cover."""
    names = list(dict.fromkeys(n for s in listed for n in (s.name, *s.covers)))
    found = set(select.stages(glob, names, option, everywhere))
    return [s.name for s in listed if s.name in found or found & set(s.covers)]


def _bypasses(
    request: Request, listed: Sequence[Stage], known: Sequence[Stage], everywhere: Sequence[str]
) -> tuple[dict[str, Bypass], set[str]]:
    """Who computes which production stage, and which stages of all sides run the direct-residual arithmetic."""
    bypass: dict[str, Bypass] = {}
    partners = {s.name: str(getattr(s, "direct_with", "")) for s in known if getattr(s, "direct_with", "")}
    direct: set[str] = set(partners) if request.direct_residual else set()
    for text in request.bypass:
        glob, value = select.assignment(text, "--bypass", "production|reference|direct")
        names = _select(glob, listed, "--bypass", everywhere)
        if value == "direct":
            able = [n for n in names if n in partners]
            if not able:
                raise UsageError(
                    f"--bypass {text!r}: {names[0]} has no direct-residual form; only X_hc and X_mix stages do"
                )
            direct |= {m for n in able for m in (n, partners[n])}
        elif value == "production":
            direct -= {m for n in names if n in direct for m in (n, partners[n])}
            bypass.update(dict.fromkeys(names, "production"))
        elif value == "reference":
            bypass.update(dict.fromkeys(names, "reference"))
        else:
            raise UsageError(f"--bypass {text!r}: expected production, reference or direct, got {value!r}")
    return bypass, direct


def _replacements(
    request: Request,
    listed: Sequence[Stage],
    everywhere: Sequence[str],
    bypass: Mapping[str, Bypass],
    direct: set[str],
) -> dict[str, str]:
    replaced: dict[str, str] = {}
    for text in request.replace:
        glob, target = select.assignment(text, "--replace", "path.py:function")
        for name in _select(glob, listed, "--replace", everywhere):
            if bypass.get(name) == "reference" or name in direct:
                raise UsageError(f"--replace {text!r}: {name} is bypassed too; drop one of the two")
            replaced[name] = target
    return replaced


def _needed(stages: Sequence[Stage], wanted: set[str]) -> set[str]:
    """Wanted stages and everything upstream of them among ``stages``."""
    writer = {o.wire: s for s in stages for o in s.outputs}
    todo, found = [s for s in stages if s.name in wanted], set[str]()
    while todo:
        stage = todo.pop()
        if stage.name not in found:
            found.add(stage.name)
            todo += [writer[w] for w in stage.inputs.values() if w in writer]
    return found


def _oracle(reference: Sequence[Stage], steps: Sequence[Step]) -> tuple[str, ...]:
    """Reference stages that the free rows need in float64: what production runs, and what it should have produced."""
    inside = [s for s in reference if any(s.name in step.covers for step in steps)]
    found = _needed(inside, {c for step in steps if step.free_run for c in step.covers})
    return tuple(s.name for s in inside if s.name in found)


def _composed(reference: Sequence[Stage], steps: Sequence[Step]) -> tuple[str, ...]:
    """Every reference stage up to the last one that the run needs: what hooks certify is a prefix of the model."""
    names = [s.name for s in reference]
    last = max((names.index(c) for step in steps for c in step.covers if c in names), default=len(names) - 1)
    return tuple(names[: last + 1])


def _last_use(steps: Sequence[Step], production: Mapping[str, Stage], reference: Mapping[str, Stage]) -> dict[str, int]:
    """The last step at which a free run still reads a wire, on production's or the oracle's side."""
    last: dict[str, int] = {}
    for i, step in enumerate(steps):
        readers = [reference[c] for c in step.covers if c in reference]
        if step.stage in production:
            readers.append(production[step.stage])
        for stage in readers:
            last.update(dict.fromkeys(stage.inputs.values(), i))
            last.update({o.wire: max(i, last.get(o.wire, i)) for o in stage.outputs})
    return last
