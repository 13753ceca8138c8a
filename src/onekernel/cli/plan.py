"""Show how a model is shared out over the SMs of a GPU: phases, bytes per phase and SM, balance, predicted time.

Needs no GPU and reads no weights. The prediction is for the speeds of an H200, fitted to what was measured on one; the
memory's and a hand-over's can be given.
"""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from onekernel.cli.console import Console
from onekernel.cli.flags import add_context, add_model, engine_config, model_name
from onekernel.errors import ConfigError, DenseOnlyError

if TYPE_CHECKING:
    from onekernel.config import ModelConfig
    from onekernel.plan.limits import Limits
    from onekernel.plan.plan import Plan
    from onekernel.plan.prediction import Speeds

HELP = "how a model is shared out over a GPU's SMs"
USAGE = "MODEL [options]"

H200_SMS = 132
H200_ARCH = "sm_90"
POSITION = 127
"""The mean over a prompt of 64 tokens and an answer of 128."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, with every phase")
    parser.add_argument("--ctas", metavar="N", type=int, help="SMs, one CTA on each (default: this GPU's, else 132)")
    parser.add_argument("--sequences", metavar="N", type=int, default=1, help="answers at once, 1 (default) or 8")
    parser.add_argument(
        "--active-fraction",
        metavar="X",
        type=float,
        help="neurons behind a ReLU gate that are taken to fire (default 0.05)",
    )
    parser.add_argument("--dense", action="store_true", help="read all neurons, also those that do not fire")
    parser.add_argument("--validate", action="store_true", help="also prove the plan sound, which takes some seconds")
    parser.add_argument(
        "--read-gbps", metavar="X", type=float, help="what memory gives the kernel (default: an H200's)"
    )
    parser.add_argument("--hand-over-us", metavar="X", type=float, help="of one phase to the next (default: an H200's)")
    parser.add_argument(
        "--position", metavar="N", type=int, help=f"tokens before the one whose time is predicted (default {POSITION})"
    )
    add_context(parser)
    add_model(parser, running=False)


def run(args: argparse.Namespace, console: Console) -> int:
    """Run the command; return the exit code."""
    name, options = model_name(args), engine_config(args)
    given = {speed: value for speed in ("read_gbps", "hand_over_us") if (value := getattr(args, speed)) is not None}
    for speed, value in given.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"--{speed.replace('_', '-')} is {value}; give a positive number")
    if args.dense and args.active_fraction is not None:
        raise ConfigError("--dense reads all neurons, and --active-fraction says how many fire: give one of them")

    import json
    from dataclasses import replace

    from onekernel.config import PAGE_TOKENS, SparseChoice, context_tokens
    from onekernel.engine.megakernel_load import first_plan
    from onekernel.models.registry import model_config
    from onekernel.plan.limits import Limits
    from onekernel.plan.plan import ASSUMED_ACTIVE_FRACTION
    from onekernel.plan.prediction import H200
    from onekernel.plan.validate import validate
    from onekernel.weights.open import LoadFormat, local_path, open_checkpoint

    # The settings are all that is needed, and "dummy" opens nothing else.
    path = local_path(name)
    load_format: LoadFormat = "auto" if path.suffix == ".gguf" and path.exists() else "dummy"
    checkpoint = open_checkpoint(name, revision=args.revision, load_format=load_format, progress=console.note)
    try:
        settings, config = checkpoint.settings, model_config(checkpoint.settings.config)
    finally:
        checkpoint.close()
    context = context_tokens(options.max_context, config)
    position = min(POSITION, context - 1) if args.position is None else args.position
    if not 0 <= position < context:
        raise ConfigError(f"--position is {position}; with a context of {context} tokens give 0 to {context - 1}")
    ctas, shared, arch = _machine(args.ctas, args.device)
    pages = args.sequences * -(-context // PAGE_TOKENS)
    limits = Limits(ctas=ctas, shared_bytes=shared, max_context=context, num_pages=pages, sequences=args.sequences)
    fraction: float | None = args.active_fraction
    sparse: SparseChoice = "off" if args.dense else "auto" if fraction is None else "on"
    plan = first_plan(
        config, limits, arch, sparse=sparse, active_fraction=ASSUMED_ACTIVE_FRACTION if fraction is None else fraction
    )
    dense = None if args.dense else why_dense(plan, config, limits, arch)
    if args.validate:
        validate(plan)
        console.note("the plan is sound")
    speeds = replace(H200, **given)
    if args.json:
        console.data(
            json.dumps({"model": settings.name, "why_dense": dense} | as_json(plan, position, speeds), indent=1)
        )
        return 0
    for line in describe(settings.name, plan, position, speeds, dense):
        console.data(line)
    return 0


def why_dense(plan: Plan, config: ModelConfig, limits: Limits, arch: str) -> str | None:
    """Return why all neurons of a model with a ReLU gate are read; None if they are not, or it has no such gate."""
    from onekernel.engine.megakernel_load import first_plan
    from onekernel.plan.plan import why_not_sparse

    if plan.layout.sparse or config.hidden_act == "silu":
        return None
    reason = why_not_sparse(config)
    if reason is None:
        try:
            first_plan(config, limits, arch, sparse="on")
        except DenseOnlyError as error:
            reason = error.reason
        except ConfigError as error:
            reason = str(error)
    return reason


def describe(name: str, plan: Plan, position: int, speeds: Speeds, dense: str | None = None) -> list[str]:
    """Return lines for people; dense: why all neurons are read although some could rest."""
    from onekernel.plan.prediction import predict_us

    limits, shared, rows = plan.limits, plan.shared, _tile_rows(plan)
    beside = shared.total_bytes - shared.ring_bytes
    facts = [
        ("model", name),
        (
            "machine",
            f"{limits.ctas} CTAs of {limits.consumer_warps} + 1 warps, each {limits.shared_bytes} shared bytes",
        ),
        ("ring", f"{shared.stages} stages of {limits.stage_bytes} bytes, beside {beside} bytes for everything else"),
        ("context", f"{limits.max_context} tokens; a KV head's cache lies with {plan.members} CTAs"),
        ("tile rows", ", ".join(f"{name} {count}" for name, count in rows.items())),
        ("exchange", f"{plan.exchange_words * 8} bytes"),
        ("read per token", f"{plan.bytes_per_token / 1e9:.3f} GB, imbalance {plan.imbalance:.4f}{_assumed(plan)}"),
        *([] if dense is None else [("feed-forwards", f"dense: {dense}")]),
        (
            "predicted",
            f"{predict_us(plan, position, speeds):.0f} us per token after {position} others, at "
            f"{speeds.read_gbps:g} GB/s with {plan.hand_overs} hand-overs of {speeds.hand_over_us:g} us",
        ),
    ]
    lines = [f"{label:14} {value}" for label, value in facts]
    lines += ["", "phase      times      kB each   kB per SM: least      mean      most"]
    for kind in dict.fromkeys(phase.kind for phase in plan.phases):
        read = plan.bytes_per_phase[:, [phase.index for phase in plan.phases if phase.kind == kind]] / 1e3
        line = f"{kind.name.lower():10} {read.shape[1]:5}"
        if read.any():
            each = read.sum(axis=0).mean()
            line += f" {each:12.1f} {read.min():18.1f} {read.mean():9.1f} {read.max():9.1f}"
        lines.append(line)
    return lines


def _tile_rows(plan: Plan) -> dict[str, int]:
    matrices = plan.layout.matrices
    return {
        "residual": matrices["out", 0].tile_rows,
        "qkv": matrices["qkv", 0].tile_rows,
        "gate_up": matrices["gate" if plan.layout.sparse else "gate_up", 0].tile_rows,
        "head": plan.layout.head.tile_rows,
    }


def _assumed(plan: Plan) -> str:
    return "" if plan.active_fraction is None else f", if {100 * plan.active_fraction:g} % of the neurons fire"


def as_json(plan: Plan, position: int, speeds: Speeds) -> dict[str, Any]:
    """Return everything, phase by phase; bytes are those of matrices."""
    from dataclasses import asdict

    from onekernel.plan.prediction import predict_us

    read = plan.bytes_per_phase
    phases = [
        {
            "kind": phase.kind.name.lower(),
            "layer": phase.layer,
            "bytes": int(read[:, phase.index].sum()),
            "least_bytes": int(read[:, phase.index].min()),
            "most_bytes": int(read[:, phase.index].max()),
        }
        for phase in plan.phases
    ]
    return {
        "ctas": plan.limits.ctas,
        "context_tokens": plan.limits.max_context,
        "sequences": plan.limits.sequences,
        "ring_stages": plan.shared.stages,
        "shared_bytes": plan.shared.total_bytes,
        "exchange_bytes": plan.exchange_words * 8,
        "tile_rows": _tile_rows(plan),
        "members": plan.members,
        "active_fraction": plan.active_fraction,
        "bytes_per_token": plan.bytes_per_token,
        "imbalance": plan.imbalance,
        "hand_overs": plan.hand_overs,
        **asdict(speeds),
        "position": position,
        "predicted_us": predict_us(plan, position, speeds),
        "phases": phases,
    }


def _machine(ctas: int | None, device: str) -> tuple[int, int, str]:
    """Return CTAs, their shared memory and the architecture: as asked, else this GPU's, else an H200's."""
    from onekernel.device.facts import facts
    from onekernel.device.support import architecture
    from onekernel.errors import DeviceError
    from onekernel.plan.limits import Limits

    if ctas is None and device != "cpu":
        try:
            found = facts("cuda" if device == "auto" else device)
            return found.sm_count, found.shared_bytes_per_block, architecture(found)
        except DeviceError:
            if device != "auto":
                raise
    shared_bytes = Limits(ctas=1, max_context=1, num_pages=1).shared_bytes
    return H200_SMS if ctas is None else ctas, shared_bytes, H200_ARCH
