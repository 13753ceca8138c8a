"""Trace one token of a running megakernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from onekernel.engine.megakernel import Megakernel, TraceBuffer
from onekernel.engine.megakernel_backend import MegakernelBackend
from onekernel.engine.megakernel_load import traced
from onekernel.engine.paged_backend import own_sequence
from onekernel.engine.request import CancelToken
from onekernel.engine.running_launch import Patience, RunningLaunch
from onekernel.measure.marks import HEAD_WORDS
from onekernel.measure.timeline import Timeline, read_timeline
from onekernel.plan.chunks import ALONE_PIECES
from onekernel.plan.plan import Plan

WARM_UP_LAUNCHES = 2
"""A kernel's first launch finds cold caches."""

_MARKS_PER_PHASE = 8
_MARKS_PER_STAGE = 3


def trace_room(plan: Plan, context: int) -> int:
    """Return the words of a stream that holds every mark of one token of `plan` after `context` tokens."""
    limits, config = plan.limits, plan.config
    weights = int(plan.bytes_per_phase.sum(axis=1).max()) // limits.stage_bytes + len(plan.phases)
    heads = config.num_key_value_heads * config.num_hidden_layers * limits.sequences
    pieces = (context // 8 + 1) * heads // max(1, plan.members) + ALONE_PIECES * heads
    rounds = len(plan.phases) * _MARKS_PER_PHASE * config.num_key_value_heads
    return HEAD_WORDS + rounds + _MARKS_PER_STAGE * (weights + pieces) + 64


def trace_token(backend: MegakernelBackend, prompt: Sequence[int], token: int) -> Timeline:
    """Answer a prompt greedily and return where the time of answer token `token` (0 the first) went.

    The backend must be idle. Raises DeviceError if the kernel had to be stopped or its trace is not whole.
    """
    megakernel = traced(backend.megakernel, backend.device)
    own = own_sequence(backend.open(prompt, len(prompt) + token + 2))
    try:
        backend.prefill(own, CancelToken(), lambda done, total: None)
        table = backend.device_table(own)
        for _ in range(WARM_UP_LAUNCHES):
            words = trace_launch(megakernel, prompt, table, token, backend.patience)
    finally:
        backend.release(own)
    return replace(read_timeline(megakernel.plan, words), active_neurons=megakernel.active_neurons())


def trace_launch(
    megakernel: Megakernel, prompt: Sequence[int], table: torch.Tensor, token: int, patience: Patience
) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """Launch a traced kernel up to answer token `token` + 1 and return its streams, (ctas, 2, room).

    The token after the traced one keeps the loader from seeing the end of its work.
    """
    plan, limit = megakernel.plan, token + 2
    shape = (plan.limits.ctas, 2, trace_room(plan, len(prompt) + limit))
    trace = TraceBuffer(torch.zeros(shape, dtype=torch.int64, device=megakernel.device), token)
    pages = megakernel.plan.block_pages_after(len(prompt))
    megakernel.launch([prompt[-1]], [len(prompt) - 1], table, limit, block_pages=pages, trace=trace)
    running = RunningLaunch(megakernel, patience)
    try:
        for index in range(limit):
            running.token(index, CancelToken())
    finally:
        running.end()
    return trace.words.cpu().numpy().view(np.uint64)
