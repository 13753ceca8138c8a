"""What must hold of every plan, proved from its records: a plan that passes neither hangs nor reads or writes astray.

`check_order` (plan/ordering.py) does the exchange; here are weights, owners, the cache and the memory.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from onekernel.errors import ConfigError, PlanError
from onekernel.phases.frame import unit_flags
from onekernel.plan.abi import Kind
from onekernel.plan.layout import MatrixKind, MatrixPlace, round_up
from onekernel.plan.ordering import check_order
from onekernel.plan.plan import PRODUCTS, PhaseInfo, Plan, header_values, plan_shared

Column = npt.NDArray[np.void]


def validate(plan: Plan) -> None:
    """Raise PlanError if the plan is unsound.

    Proved: every CTA has the phases in order; every unit of every matrix is read once per token, by a task whose
    records agree with the layout; the hidden rows have one owner; each KV head has every member once; all ranges lie in
    their buffers and the buffers apart; every word is written once and before it is read, and not again before all its
    readers have it, whatever the length; shared memory is within the limits.
    """
    _check_memory(plan)
    for phase in plan.phases:
        column = plan.tasks[:, phase.index]
        if (column["kind"] != phase.kind).any() or (column["layer"] != phase.layer).any():
            raise PlanError(f"{_name(phase)}: a CTA has another phase there")
        if phase.kind in PRODUCTS:
            _check_product(plan, phase, column)
        elif phase.kind == Kind.EMBED:
            _check_embed(plan, phase, column)
        elif phase.kind in (Kind.ATTENTION, Kind.COMBINE):
            _check_heads(plan, phase, column)
        elif phase.kind == Kind.GATHER:
            _check_gather(plan, phase, column)
        elif column["count"].sum() != 1 or column["count"].max() != 1:
            raise PlanError(f"{_name(phase)}: {column['count'].sum()} CTAs choose; it must be one")
        _check_words(plan, phase, column)
    check_order(plan)


def _check_memory(plan: Plan) -> None:
    try:
        shared = plan_shared(plan.config, plan.limits, plan.layout, plan.tasks)
    except ConfigError as error:
        raise PlanError(str(error)) from error
    if shared != plan.shared:
        raise PlanError(f"the shared memory of the plan is not what its tasks need: {plan.shared}, not {shared}")
    if shared.total_bytes > plan.limits.shared_bytes:
        raise PlanError(f"{shared.total_bytes} bytes of shared memory; the limit is {plan.limits.shared_bytes}")
    expected = header_values(plan.config, plan.limits, plan.layout, plan.buffers, shared, plan.tasks)
    for name, value in expected.items():
        _equal("the header", f"its {name}", plan.header[name], np.array(value, plan.header[name].dtype))
    if not 0 < plan.header["vocab_limit"] <= plan.config.vocab_size:
        raise PlanError(f"vocab_limit is {plan.header['vocab_limit']} of a vocabulary of {plan.config.vocab_size}")
    end = 0
    for buffer in sorted(plan.buffers, key=lambda buffer: buffer.word):
        if buffer.word < end:
            raise PlanError(f"the buffer {buffer.name} begins at word {buffer.word}, inside the one before")
        end = buffer.word + buffer.words * plan.limits.sequences
    if end > plan.exchange_words:
        raise PlanError(f"the buffers end at word {end} of {plan.exchange_words}")


def _check_product(plan: Plan, phase: PhaseInfo, column: Column) -> None:
    kind, place = _matrix(plan, phase)
    busy = column[column["count"] > 0]
    _equal(phase, "flags", busy["flags"], unit_flags(place))
    _equal(phase, "k_units", busy["k_units"], place.k_units)
    _equal(phase, "weights", busy["weights"], place.offset_bytes + busy["first"].astype(np.int64) * place.tile_bytes)
    _equal(phase, "inputs", busy["inputs"], round_up(place.columns, 4))
    constants = plan.layout.constants
    _equal(phase, "bias", busy["bias"], constants.biases.get((kind, phase.layer), -1) + 1)
    norms = {
        "qkv": constants.attention_norms,
        "out": constants.attention_sub_norms,
        "gate_up": constants.mlp_norms,
        "gate": constants.mlp_norms,
        "down": constants.mlp_sub_norms,
        "head": (constants.final_norm,),
    }[kind]
    _equal(phase, "norm", busy["norm"], norms[phase.layer] + 1 if norms else 0)
    _check_cover(phase, column, place.row_tiles)
    if phase.kind in (Kind.OUT, Kind.DOWN):
        _check_owner(plan, phase, column)
    if phase.kind == Kind.GATE and len(busy) < len(column):
        raise PlanError(f"{_name(phase)}: {len(column) - len(busy)} CTAs have no neurons, so they give no sums")


def _check_embed(plan: Plan, phase: PhaseInfo, column: Column) -> None:
    _equal(phase, "flags", column["flags"], unit_flags(plan.layout.matrices["out", 0]))
    _equal(phase, "weights", column["weights"], plan.layout.embedding_bytes)
    _check_cover(phase, column, plan.layout.hidden_tiles)


def _check_gather(plan: Plan, phase: PhaseInfo, column: Column) -> None:
    """What all CTAs' neurons give is added up by the residual's owners."""
    _equal(phase, "flags", column["flags"], unit_flags(plan.layout.matrices["out", 0]))
    _check_cover(phase, column, plan.layout.hidden_tiles)
    _check_owner(plan, phase, column)


def _check_owner(plan: Plan, phase: PhaseInfo, column: Column) -> None:
    """The residual lies in its owner's shared memory, where embed has put it."""
    embed = plan.tasks[:, 0]
    _equal(
        phase,
        "first (the residual's owner)",
        np.where(column["count"] > 0, column["first"], embed["first"]),
        embed["first"],
    )
    _equal(phase, "count (the residual's owner)", column["count"], embed["count"])


def _check_cover(phase: PhaseInfo, column: Column, tiles: int) -> None:
    first, count = column["first"].astype(np.int64), column["count"].astype(np.int64)
    order = np.lexsort((count, first))
    order = order[count[order] > 0]
    stops = first[order] + count[order]
    if not len(order) or first[order[0]] != 0 or stops[-1] != tiles or (first[order[1:]] != stops[:-1]).any():
        raise PlanError(f"{_name(phase)}: the CTAs' row tiles do not cover 0 to {tiles - 1}, each once")


def _check_heads(plan: Plan, phase: PhaseInfo, column: Column) -> None:
    """Every member of every KV head is one CTA, so a cached position has one owner; all of them combine."""
    members, heads = int(plan.header["members"]), plan.config.num_key_value_heads
    served = [
        (int(task["first"]) + turn * int(task["stride"]), int(task["member"]))
        for task in column
        for turn in range(min(int(task["count"]), heads + 1))
    ]
    parts = members if phase.kind == Kind.ATTENTION or members > 1 else 0
    wanted = [(head, member) for head in range(heads) for member in range(parts)]
    if sorted(served) != wanted:
        wrong = sorted(set(served) ^ set(wanted)) or [pair for pair in served if served.count(pair) > 1]
        what = f"KV head {wrong[0][0]} has no member {wrong[0][1]}, or has it twice, or should not have it"
        raise PlanError(f"{_name(phase)}: {what}; there are {heads} heads of {members} members")


def _check_words(plan: Plan, phase: PhaseInfo, column: Column) -> None:
    takes, gives = {
        Kind.EMBED: ("token", "x"),
        Kind.QKV: ("x", "qkv"),
        Kind.ATTENTION: ("qkv", "partial"),
        Kind.COMBINE: ("partial", "mixed"),
        Kind.OUT: ("mixed", "x"),
        Kind.GATE_UP: ("x", "inner"),
        Kind.DOWN: ("inner", "x"),
        Kind.GATE: ("x", "sums"),
        Kind.GATHER: ("sums", "x"),
        Kind.HEAD: ("x", "best"),
        Kind.CHOOSE: ("best", "token"),
    }[phase.kind]
    words = {buffer.name: buffer.word for buffer in plan.buffers}
    busy = column if phase.kind in (Kind.EMBED, Kind.HEAD) else column[column["count"] > 0]
    _equal(phase, "in_word", busy["in_word"], words[takes])
    _equal(phase, "out_word", busy["out_word"], words[gives])


def _matrix(plan: Plan, phase: PhaseInfo) -> tuple[MatrixKind, MatrixPlace]:
    for (kind, layer), place in plan.layout.matrices.items():
        if kind.upper() == phase.kind.name and layer == phase.layer:
            return kind, place
    raise PlanError(f"{_name(phase)}: the layout has no matrix for it")


def _equal(where: PhaseInfo | str, name: str, found: npt.NDArray[np.generic], expected: object) -> None:
    wrong = np.asarray(found != expected)
    if not wrong.any():
        return
    index = int(np.flatnonzero(wrong.ravel())[0])
    value, wanted = np.ravel(found)[index], np.broadcast_to(np.asarray(expected), np.shape(found)).ravel()[index]
    place = where if isinstance(where, str) else _name(where)
    raise PlanError(f"{place}: {name} is {value}, not {wanted}")


def _name(phase: PhaseInfo) -> str:
    return f"phase {phase.index} ({phase.kind.name.lower()} of layer {phase.layer})"
