"""Kernels are written in a small language: one wrapper per instruction, no conditionals, one place that waits.

What breaks these rules would still compile, but not run on the CPU, or hang there and on the GPU without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import onekernel
from onekernel.device.watch import WAITS

PACKAGE = Path(onekernel.__file__).parent
SOURCES = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".cu", ".cuh"))
ONLY_IN_PTX = {
    r"\basm\b": "inline assembly: write a wrapper in ptx/ with its CPU branch",
    r"^\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b|__CUDA_ARCH__|__CUDACC__": "a compiler conditional",
    r"\b__shared__\b": "a static shared array, whose overflow AddressSanitizer cannot see: use dynamic_shared()",
    r"\batomic[A-Z]\w*\(": "a builtin atomic: use ptx/atomic.cuh, and never on floats",
    r"\bvolatile\b": "a volatile access: say which order and scope, with ptx/access.cuh",
    r"\b__(shfl|ballot|any|all)\w*\(": "a builtin of the warp: use ptx/shuffle.cuh",
}
ONLY_IN_SPIN = {
    r"\b(mbarrier_test|mbarrier_try_wait)\(": "a wait for an mbarrier: use spin_mbarrier(), or spin() around it",
    r"\bspin_pause\(": "a loop that waits: use spin()",
    r"\bwhile \((true|1)\)|\bfor \(;;\)": "a loop without an end: use spin()",
}
NOWHERE = {r"#\s*include\s*<": "a system header: NVRTC would need its folder, and the shim its contents"}
POLLING = re.compile(r"\b(cluster_)?load_(relaxed|acquire)\w*\(")


def code(source: str) -> str:
    """The source without comments, line by line as before."""
    return re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), source, flags=re.DOTALL)


def in_parentheses(text: str, before: str) -> Iterator[tuple[int, int]]:
    """Where the text inside the parentheses after each of some words begins and ends."""
    for match in re.finditer(rf"\b(?:{before})\s*\(", text):
        depth, end = 1, match.end()
        while depth and end < len(text):
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        yield match.end(), end - 1


def outside_of_spin(text: str) -> str:
    """The text without what spin() is called with, line by line as before."""
    for begin, end in reversed(list(in_parentheses(text, "spin"))):
        text = text[:begin] + "\n" * text.count("\n", begin, end) + text[end:]
    return text


def faults_in(source: str, path: str) -> list[str]:
    """What in one file breaks a rule; `path` is relative to the package."""
    rules = dict(NOWHERE)
    if not path.startswith(("kernels/ptx/", "kernels/shim/")):
        rules |= ONLY_IN_PTX
        if path != "kernels/tile/spin.cuh":
            rules |= ONLY_IN_SPIN
    text = outside_of_spin(code(source))
    found = [
        f"line {number}: {reason}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern, reason in rules.items()
        if re.search(pattern, line)
    ]
    if ONLY_IN_SPIN.items() <= rules.items():
        found += [
            f"line {text.count(chr(10), 0, begin) + 1}: polls in a loop: use spin()"
            for begin, end in in_parentheses(text, "while|for")
            if POLLING.search(text, begin, end)
        ]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_source_keeps_to_the_language(path: Path) -> None:
    assert faults_in(path.read_text(), str(path.relative_to(PACKAGE))) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('asm volatile("bar.sync 0;");', "inline assembly"),
        ("#ifdef DEBUG", "a compiler conditional"),
        ("  # if RING_WARPS > 8", "a compiler conditional"),
        ("constexpr bool NEW = __CUDA_ARCH__ >= 900;", "a compiler conditional"),
        ("#include <cooperative_groups.h>", "a system header"),
        ("#include <cuda/barrier>", "a system header"),
        ("#include <cuda.h>", "a system header"),
        ("__shared__ float sums[32];", "a static shared array"),
        ("atomicAdd(&sum, 1.0f);", "a builtin atomic"),
        ("float other = __shfl_xor_sync(~0u, mine, 1);", "a builtin of the warp"),
        ("volatile u32* flag = words;", "a volatile access"),
        ("while (load_acquire_gpu(flag) == 0) {}", "polls in a loop"),
        ("for (u32 i = 0; load_relaxed_sys(flag) != i; i++) {}", "polls in a loop"),
        ("do { n++; } while (n < 9 && (load_relaxed_gpu(flag) >> 32) != tag);", "polls in a loop"),
        ("while (!mbarrier_try_wait(barrier, 0)) {}", "a wait for an mbarrier"),
        ("for (;;) step();", "a loop without an end"),
        ("while (true) step();", "a loop without an end"),
        ("while (*flag == 0) spin_pause();", "a loop that waits"),
    ],
)
def test_a_breach_is_seen(line: str, reason: str) -> None:
    assert any(reason in fault for fault in faults_in(f"// fine\n{line}\n", "kernels/new.cu"))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("kernels/ptx/new.cuh", '#ifdef __CUDACC__\nasm volatile("nop;");\n#endif'),
        ("kernels/tile/spin.cuh", "while (!mbarrier_try_wait(barrier, parity)) spin_pause();"),
        ("kernels/new.cu", "// asm, #if and while (true) are words in a comment /* too */"),
        ("kernels/new.cu", "spin(watch, kind, 0, 1, [&](u64& seen) {\nreturn mbarrier_test(b, 0) || left();\n});"),
        ("kernels/new.cu", "const u32 token = load_relaxed_gpu(word);"),
        ("kernels/new.cu", "for (u32 i = 0; i < n; i++) sum += load_relaxed_gpu(words + i);"),
    ],
)
def test_what_is_allowed_passes(path: str, line: str) -> None:
    assert faults_in(line, path) == []


def test_python_knows_every_wait() -> None:
    """The table of who waited for what is read with these names."""
    spin = (PACKAGE / "kernels" / "tile" / "spin.cuh").read_text()
    body = re.search(r"enum class Wait : u32 \{(.*?)\};", spin, re.DOTALL)
    assert body is not None
    assert {int(number) for number in re.findall(r"^\s*[A-Z]+ = (\d+),", body[1], re.MULTILINE)} == set(WAITS)
