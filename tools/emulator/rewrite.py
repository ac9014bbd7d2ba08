"""CUDA text as C++ text for the machine: shared arrays and inline PTX are what a host compiler does not know.

An instruction that is not in the table, or is written in a form that the table does not foresee, is an error.
"""

from __future__ import annotations

import re

from .errors import EmulationError

#: Functions of ``cpp/include/ptx.h`` by the instruction they stand for.
INSTRUCTIONS = {
    "bar.sync": "bar_sync",
    "barrier.sync": "bar_sync",
    "bar.arrive": "bar_arrive",
    "barrier.arrive": "bar_arrive",
    "cvt.rn.f16x2.f32": "cvt_half2",
    "cvt.rn.bf16x2.f32": "cvt_bfloat162",
    "ex2.approx.f32": "ex2",
    "ex2.approx.ftz.f32": "ex2",
    "rcp.approx.f32": "rcp",
    "rcp.approx.ftz.f32": "rcp",
    "fence.proxy.async.shared::cta": "fence_proxy",
    "fence.proxy.async": "fence_proxy",
    "griddepcontrol.launch_dependents": "nothing",
    "griddepcontrol.wait": "wait_for_grids",
    "movmatrix.sync.aligned.m8n8.trans.b16": "movmatrix_trans",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "mma_k16<true>",
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "mma_k16<false>",
    "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32": "mma_k8<true>",
    "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32": "mma_k8<false>",
}
for _count in (1, 2, 4):
    for _trans in ("", ".trans"):
        for _shape in (f"m8n8.x{_count}{_trans}", f"x{_count}{_trans}.m8n8"):
            _end = f"sync.aligned.{_shape}.shared.b16"
            INSTRUCTIONS[f"ldmatrix.{_end}"] = f"ldmatrix_x{_count}{_trans.replace('.', '_')}"
            INSTRUCTIONS[f"stmatrix.{_end}"] = f"stmatrix{_trans.replace('.', '_')}"
    for _type in ("b32", "f32", "u32"):
        _vector = "" if _count == 1 else f"v{_count}."
        INSTRUCTIONS[f"st.shared.{_vector}{_type}"] = "st_shared"
        INSTRUCTIONS[f"ld.shared.{_vector}{_type}"] = "ld_shared"

_ASM = re.compile(r"\b(?:asm|__asm__)\b\s*(?:volatile\b|__volatile__\b)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s*)?([\w ]+?)\s+(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"__shared__\s+(?:__align__\((\d+)\)\s*)?([\w: ]+?)\s+(\w+)\s*((?:\[[^\];]+\])*)\s*;")
_INSTRUCTION = re.compile(r"^(\S+?)(?:\s+(.*))?$", re.DOTALL)


def rewrite(text: str) -> str:
    """The text with every ``__shared__`` declaration and ``asm`` statement replaced by calls of the machine.

    Raises EmulationError at an instruction that is not modelled, with the line it stands on.
    """
    text = _DYNAMIC.sub(r"\1* const \2 = static_cast<\1*>(emu::dynamic_shared());", text)
    text = _STATIC.sub(_static, text)
    if "__shared__" in text:
        line = text[: text.index("__shared__")].count("\n") + 1
        raise EmulationError(f"a shared declaration must be an array or a plain variable, but line {line} is neither.")
    parts, end = [], 0
    for match in _ASM.finditer(text):
        close = _closing(text, match.end())
        line = text[: match.start()].count("\n") + 1
        call = _call(text[match.end() : close], line)
        lost = text[match.start() : close].count("\n") - call.count("\n")  # line numbers stay
        parts += [text[end : match.start()], call, "\n" * lost]
        end = close + 1
    return "".join([*parts, text[end:]])


def _static(match: re.Match) -> str:
    alignment, element, name, extents = match.groups()
    whole = f"{element}{extents}"
    align = alignment or f"alignof({whole})"
    return f'auto& {name} = emu::shared_array<{whole}>("{name}", __COUNTER__, {align});'


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one before ``start``; strings are skipped."""
    depth, i = 1, start
    while depth:
        string = _STRING.match(text, i)
        if string:
            i = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        i += 1
    return i - 1


def _split(text: str, separator: str) -> list[str]:
    """Pieces between separators that are outside of strings and brackets."""
    pieces, depth, i, start = [], 0, 0, 0
    while i < len(text):
        string = _STRING.match(text, i)
        if string:
            i = string.end()
            continue
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[i], 0)
        if text[i] == separator and depth == 0:
            pieces.append(text[start:i])
            start = i + 1
        i += 1
    return [*pieces, text[start:]]


def _call(body: str, line: int) -> str:
    """The call that stands for one ``asm`` statement; ``body`` is what its parentheses hold."""
    sections = [part.strip() for part in _split(body, ":")]
    template = " ".join("".join(_STRING.findall(sections[0])).replace("\\n", " ").replace("\\t", " ").split())
    operands = []
    for section in sections[1:3]:
        for operand in _split(section, ","):
            if operand.strip():
                constraint = _STRING.search(operand)
                operands.append((constraint.group(1), operand[constraint.end() :].strip()))
    instruction = template.rstrip("; ")
    if not instruction:  # tells the compiler something, not the device
        lost = [f"emu::ptx::forget({expression})" for constraint, expression in operands if constraint.startswith("=")]
        return ", ".join(lost) or "static_cast<void>(0)"
    name, rest = _INSTRUCTION.match(instruction).groups()
    if name not in INSTRUCTIONS or ";" in instruction:
        raise EmulationError(
            f"inline PTX must be one instruction of the table in {__name__}, but line {line} has `{template}`; "
            "add a function to cpp/include/ptx.h and a row to the table."
        )
    arguments = []
    for word in re.findall(r"%\d+|-?\w+", rest or ""):
        arguments.append(operands[int(word[1:])][1] if word.startswith("%") else word)
    return f"emu::ptx::{INSTRUCTIONS[name]}({', '.join(arguments)})"
