"""One CTA of an interpreted launch: a generator that goes through its tasks and yields what it must wait for.

It knows its tasks, its residual, and the exchange; nothing else of the other CTAs. The numbers are the kernel's:
float32, with bf16 where the kernel rounds. Sums over K are exact to float32, so that they depend on no partition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from onekernel.config import PAGE_TOKENS
from onekernel.errors import PlanError
from onekernel.phases.combine.reference import combine
from onekernel.plan.abi import TASK, TOKEN_FAILED, TOKEN_STOP, Flag, Kind
from onekernel.plan.chunks import chunks, owner, slices
from onekernel.plan.exchange import F32, Wait, bf16_to_float, float_to_bf16, round_bf16
from onekernel.plan.machine import F64, Machine
from onekernel.plan.quantised import QuantisedRows, normed
from onekernel.weights.arena import QUANTISED_ROWS
from onekernel.weights.ternary.packed import UNIT_COLUMNS

NO_TOKEN = 0xFFFFFFFF
Task = dict[str, int]
Waits = Iterator[Wait]


class Cta:
    """CTA number `index`."""

    def __init__(self, machine: Machine, index: int) -> None:
        self.machine, self.index = machine, index
        self.sequences = range(len(machine.first_tokens))
        names = TASK.dtype.names or ()
        self.tasks: list[Task] = [{name: int(task[name]) for name in names} for task in machine.plan.tasks[index]]
        self.residual: list[F32] = [np.zeros(0, np.float32) for _ in self.sequences]
        self.inputs: tuple[F64, np.float32] = np.zeros(0), np.float32(1)
        """A product's inputs of the last sequence, padded, and the norm's factor of its results."""
        self.token, self.phase = 0, 0
        self.stopped = [False for _ in self.sequences]
        self.over = False
        self._phases: dict[Kind, Callable[[Task], Waits]] = {
            Kind.EMBED: self._embed,
            Kind.QKV: self._qkv,
            Kind.ATTENTION: self._attention,
            Kind.COMBINE: self._combine,
            Kind.OUT: self._add_to_residual,
            Kind.GATE_UP: self._gate_up,
            Kind.DOWN: self._add_to_residual,
            Kind.GATE: self._gate,
            Kind.GATHER: self._gather,
            Kind.HEAD: self._head,
            Kind.CHOOSE: self._choose,
        }

    def run(self) -> Waits:
        """Go through all tokens; yield each wait when the words before it are taken."""
        always = (Kind.EMBED, Kind.HEAD)
        for token, (phase, task) in itertools.product(range(self.machine.limit), enumerate(self.tasks)):
            self.token, self.phase = token, phase
            kind = Kind(task["kind"])
            if task["count"] > 0 or kind in always:
                yield from self._phases[kind](task)
            if self.over:
                return

    @property
    def _tag(self) -> int:
        return self.machine.tag(self.token, self.phase)

    def _awaited(self, task: Task, word: int, words: int) -> Wait:
        return Wait(word, words, self.machine.tag(self.token, task["in_phase"]))

    def _embed(self, task: Task) -> Waits:
        machine, header = self.machine, self.machine.header
        tokens = list(machine.first_tokens)
        if self.token > 0:
            wait = Wait(task["in_word"], len(self.sequences), machine.tag(self.token - 1, task["in_phase"]))
            yield wait
            tokens = machine.exchange.take(wait).tolist()
        if tokens[0] & TOKEN_STOP:
            self.over = True
            return
        rows = _tile_rows(task)
        first, count = task["first"] * rows, task["count"] * rows
        for s in self.sequences:
            values = self._embedding(tokens[s])
            padded = np.zeros(max(first + count, len(values)), np.float32)
            padded[: len(values)] = values
            self.residual[s] = padded[first : first + count]
            machine.exchange.give_bf16(
                task["out_word"] + s * header["x_words"] + first // 2, self.residual[s], self._tag
            )

    def _embedding(self, token: int) -> F32:
        machine, header = self.machine, self.machine.header
        hidden, start = header["hidden"], header["embedding"]
        if not header["embed_packed"]:
            start += 2 * hidden * token
            return bf16_to_float(machine.arena[start : start + 2 * hidden].view(np.uint16))
        rows, units = (4 if header["embed_rows_4"] else 8), header["embed_units"]
        tile = machine.matrix(start + token // rows * units * 1024, 1, units, rows)
        return tile[token % rows, :hidden].astype(np.float32)

    def _product(self, task: Task, stride: int, done: Callable[[int, F32], None]) -> Waits:
        """Take the inputs and call done(sequence, the CTA's rows of W x, times the norm's factor, plus the bias)."""
        machine, header = self.machine, self.machine.header
        tile_rows = _tile_rows(task)
        rows, inputs = task["count"] * tile_rows, task["inputs"]
        taken = []
        for s in self.sequences:
            wait = self._awaited(task, task["in_word"] + s * stride, inputs // 2)
            yield wait
            taken.append(bf16_to_float(machine.exchange.take(wait).view(np.uint16)))
        if inputs % 4 or inputs > task["k_units"] * _unit_columns(task):
            raise PlanError(f"phase {self.phase}: {inputs} inputs for {task['k_units']} units of weights")
        bias = machine.floats(task["bias"] - 1 + task["first"] * tile_rows, rows) if task["bias"] else np.float32(0)
        if task["flags"] & (Flag.TERNARY | Flag.INT8):
            own = QuantisedRows.of(machine, task)
            for s, x in zip(self.sequences, taken, strict=True):
                done(s, own.times(*normed(machine, task, x)) + bias)
            return
        weights = machine.matrix(task["weights"], task["count"], task["k_units"], tile_rows)
        for s, x in zip(self.sequences, taken, strict=True):
            factor = np.float32(1)
            if task["norm"]:
                squares = np.float32((x.astype(np.float64) ** 2).sum())
                factor = 1 / np.sqrt(squares / np.float32(header["hidden"]) + np.float32(header["eps"]))
                x = round_bf16(x * machine.floats(task["norm"] - 1, inputs))
            padded = np.zeros(weights.shape[1])
            padded[:inputs] = x
            self.inputs = padded, np.float32(factor)
            done(s, (weights @ padded).astype(np.float32) * factor + bias)

    def _qkv(self, task: Task) -> Waits:
        header = self.machine.header

        def publish(s: int, rows: F32) -> None:
            word = task["out_word"] + s * header["qkv_words"] + task["first"] * _tile_rows(task) // 2
            self.machine.exchange.give_bf16(word, rows, self._tag)

        yield from self._product(task, header["x_words"], publish)

    def _add_to_residual(self, task: Task) -> Waits:
        header = self.machine.header

        def publish(s: int, rows: F32) -> None:
            if len(rows) != len(self.residual[s]):
                raise PlanError(f"phase {self.phase}: {len(rows)} rows for a residual of {len(self.residual[s])}")
            self.residual[s] = self.residual[s] + rows
            word = task["out_word"] + s * header["x_words"] + task["first"] * _tile_rows(task) // 2
            self.machine.exchange.give_bf16(word, self.residual[s], self._tag)

        yield from self._product(task, header["mixed_words" if task["kind"] == Kind.OUT else "inner_words"], publish)

    def _gate_up(self, task: Task) -> Waits:
        header, half = self.machine.header, _tile_rows(task) // 2

        def publish(s: int, rows: F32) -> None:
            gate, up = rows.reshape(-1, 2, half).transpose(1, 0, 2).reshape(2, -1)
            word = task["out_word"] + s * header["inner_words"] + task["first"] * half // 2
            self.machine.exchange.give_bf16(word, _activate(gate, self.machine.plan.config.hidden_act) * up, self._tag)

        yield from self._product(task, header["x_words"], publish)

    def _gate(self, task: Task) -> Waits:
        machine, header = self.machine, self.machine.header

        def publish(s: int, gates: F32) -> None:
            rows = machine.neurons(task["layer"], task["first"] * _tile_rows(task), len(gates))
            fire = np.flatnonzero(~(gates <= 0))
            x, factor = self.inputs
            ups = (rows[fire, 0] @ x).astype(np.float32) * factor
            sums = np.zeros(header["hidden_rows"], np.float32)
            inner = round_bf16(_activate(gates[fire], machine.plan.config.hidden_act) * ups)
            for value, down in zip(inner, rows[fire, 1, : len(sums)].astype(np.float32), strict=True):
                sums += value * down
            word = task["out_word"] + self.index * header["hidden_rows"]
            machine.exchange.give(word, sums.view(np.uint32), self._tag)

        yield from self._product(task, header["x_words"], publish)

    def _gather(self, task: Task) -> Waits:
        machine, header, tile_rows = self.machine, self.machine.header, _tile_rows(task)
        first, rows = task["first"] * tile_rows, task["count"] * tile_rows
        sums = np.zeros(rows, np.float32)
        for giver in range(header["ctas"]):
            wait = self._awaited(task, task["in_word"] + giver * header["hidden_rows"] + first, rows)
            yield wait
            sums += machine.exchange.take(wait).view(np.float32)
        if rows != len(self.residual[0]):
            raise PlanError(f"phase {self.phase}: {rows} rows for a residual of {len(self.residual[0])}")
        self.residual[0] = self.residual[0] + sums
        machine.exchange.give_bf16(task["out_word"] + first // 2, self.residual[0], self._tag)

    def _attention(self, task: Task) -> Waits:
        for s in self.sequences:
            for turn in range(task["count"]):
                yield from self._attend(task, s, task["first"] + turn * task["stride"])

    def _attend(self, task: Task, s: int, head: int) -> Waits:
        machine, header, config = self.machine, self.machine.header, self.machine.plan.config
        dim, position, layer = header["head_dim"], machine.positions[s] + self.token, task["layer"]
        group, half = config.num_attention_heads // header["kv_heads"], dim // 2
        members = chunks(position + 1, header["members"], header["block_pages"])
        if task["member"] >= members:
            return
        block_tokens = PAGE_TOKENS * header["block_pages"]
        appends = owner(position // block_tokens, header["members"]) == task["member"]
        base = task["in_word"] + s * header["qkv_words"]
        heads_words = [(base + head * group * half, group * half)]
        if appends:
            keys = base + header["kv_heads"] * group * half
            heads_words += [(keys + head * half, half), (keys + (header["kv_heads"] + head) * half, half)]
        taken = []
        for word, words in heads_words:
            wait = self._awaited(task, word, words)
            yield wait
            taken.append(bf16_to_float(machine.exchange.take(wait).view(np.uint16)).reshape(-1, dim))
        queries = self._norm_and_rotate(taken[0], header["q_norm"], layer, position) * np.float32(dim**-0.5)
        if appends:
            place = machine.cached(layer, head, s, position)
            place[0] = float_to_bf16(self._norm_and_rotate(taken[1], header["k_norm"], layer, position))[0]
            place[1] = float_to_bf16(taken[2])[0]
        own = [p for p in range(position + 1) if owner(p // block_tokens, header["members"]) == task["member"]]
        cache = np.stack([bf16_to_float(machine.cached(layer, head, s, p)) for p in own], axis=1)
        scores = queries @ cache[0].T
        maxima = scores.max(axis=1)
        shares = np.exp(scores - maxima[:, None])
        sums, weights = shares @ cache[1], shares.sum(axis=1)
        if members == 1:
            word = header["mixed_word"] + s * header["mixed_words"] + head * group * half
            machine.exchange.give_bf16(word, (sums / weights[:, None]).ravel(), self._tag + 1)
            return
        for h in range(group):
            number = (head * group + h) * header["members"] + task["member"]
            word = task["out_word"] + s * header["partial_words"] + number * (dim + 2)
            record = np.concatenate((sums[h], maxima[h : h + 1], weights[h : h + 1])).astype(np.float32)
            machine.exchange.give(word, record.view(np.uint32), self._tag)

    def _norm_and_rotate(self, heads: F32, norm: int, layer: int, position: int) -> F32:
        machine, header = self.machine, self.machine.header
        dim = header["head_dim"]
        if machine.plan.config.qk_norm:
            mean = (heads**2).mean(axis=1, keepdims=True)
            heads = heads / np.sqrt(mean + np.float32(header["eps"])) * machine.floats(norm + layer * dim, dim)
        turns = machine.floats(header["rope"] + position * dim, dim).reshape(-1, 2)
        cos, sin = turns[:, 0], turns[:, 1]
        first, second = heads[:, : dim // 2], heads[:, dim // 2 :]
        return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=1)

    def _combine(self, task: Task) -> Waits:
        machine, header = self.machine, self.machine.header
        half, group = header["head_dim"] // 2, machine.plan.config.num_attention_heads // header["kv_heads"]
        start, stop = slices(group * half, header["members"])[task["member"] :][:2]
        for s in self.sequences:
            parts = chunks(machine.positions[s] + self.token + 1, header["members"], header["block_pages"])
            for turn in range(task["count"] if parts > 1 else 0):
                head = task["first"] + turn * task["stride"]
                for query_head in range(head * group, (head + 1) * group):
                    first = (query_head - head * group) * half
                    low, high = max(start - first, 0), min(stop - first, half)
                    if low < high:
                        yield from self._merge(task, s, query_head, parts, low, high)

    def _merge(self, task: Task, s: int, query_head: int, parts: int, low: int, high: int) -> Waits:
        """Merge pairs of values `low` to `high` of a query head."""
        machine, header = self.machine, self.machine.header
        dim, words = header["head_dim"], 2 * (high - low)
        taken = []
        for part in range(parts):
            word = task["in_word"] + s * header["partial_words"]
            word += (query_head * header["members"] + part) * (dim + 2)
            for wait in (self._awaited(task, word + 2 * low, words), self._awaited(task, word + dim, 2)):
                yield wait
                taken.append(machine.exchange.take(wait).view(np.float32))
        sums = torch.from_numpy(np.stack(taken[::2]))[:, None]
        maxima, weights = torch.from_numpy(np.stack(taken[1::2])).unbind(dim=1)
        mixed = combine(sums, maxima[:, None], weights[:, None]).numpy()
        word = task["out_word"] + s * header["mixed_words"] + query_head * dim // 2 + low
        machine.exchange.give_bf16(word, mixed.ravel(), self._tag)

    def _head(self, task: Task) -> Waits:
        machine, header = self.machine, self.machine.header
        lowest = np.finfo(np.float32).min
        best = dict.fromkeys(self.sequences, (lowest, NO_TOKEN))
        first = task["first"] * _tile_rows(task)

        def find(s: int, rows: F32) -> None:
            logits = rows[: max(header["vocab_limit"] - first, 0)]
            machine.note_logits(self.token, s, first, logits)
            if not np.isfinite(logits).all():
                best[s] = (np.float32(np.nan), NO_TOKEN)
            elif len(logits):
                best[s] = (logits.max(), first + int(logits.argmax()))

        if task["count"] > 0:
            yield from self._product(task, header["x_words"], find)
        for s in self.sequences:
            words = np.array([np.array(best[s][0], np.float32).view(np.uint32), best[s][1]], np.uint32)
            machine.exchange.give(task["out_word"] + (s * header["ctas"] + self.index) * 2, words, self._tag)

    def _choose(self, task: Task) -> Waits:
        machine, ctas = self.machine, self.machine.header["ctas"]
        chosen = []
        for s in self.sequences:
            wait = self._awaited(task, task["in_word"] + s * ctas * 2, ctas * 2)
            yield wait
            words = machine.exchange.take(wait).reshape(ctas, 2)
            logits, tokens = words[:, 0].copy().view(np.float32), words[:, 1]
            if np.isnan(logits).any():
                chosen.append(TOKEN_FAILED)
            else:
                chosen.append(int(tokens[logits == logits.max()].min()))
        before = list(self.stopped)
        for s in self.sequences:
            ends = self.token + 1 == machine.limit or chosen[s] & TOKEN_FAILED or chosen[s] in machine.stop_ids
            self.stopped[s] = before[s] or bool(ends)
            if not before[s]:
                machine.slots[s].append(chosen[s] | (TOKEN_STOP if self.stopped[s] else 0))
        stop = TOKEN_STOP if all(self.stopped) else 0
        following = [(0 if token & TOKEN_FAILED else token) | stop for token in chosen]
        machine.exchange.give(task["out_word"], np.array(following, np.uint32), self._tag)


def _tile_rows(task: Task) -> int:
    if task["flags"] & (Flag.TERNARY | Flag.INT8):
        return QUANTISED_ROWS
    return 4 if task["flags"] & Flag.ROWS_4 else 8


def _unit_columns(task: Task) -> int:
    if task["flags"] & Flag.TERNARY:
        return UNIT_COLUMNS
    return 512 // _tile_rows(task)


def _activate(gate: F32, kind: str) -> F32:
    if kind == "silu":
        silu: F32 = gate / (1 + np.exp(-gate))
        return silu
    positive: F32 = np.maximum(gate, np.float32(0))
    return positive if kind == "relu" else positive * positive
