"""The text of a PTX kernel as instructions: ``@guard name operands``, with labels and the source line of each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Instruction:
    """``name`` split at its dots; ``source`` says where in the Triton text it comes from."""

    guard: str | None
    name: tuple[str, ...]
    operands: tuple[str, ...]
    text: str
    source: str


@dataclass
class Program:
    """A kernel: names of its parameters, instructions, and where labels point."""

    parameters: list[str]
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(ptx: str) -> Program:
    """The only kernel of ``ptx``."""
    program = Program(re.findall(r"\.param [^,\n]*?(\w+_param_\d+)", ptx))
    source = ""
    for line in ptx[ptx.index("\n{") + 2 :].split("\n"):
        found = re.match(r"\s*\.loc.*?// (.*)", line)
        source = found[1] if found else source
        text = line.split("//")[0].strip()
        if text == "}":
            break
        label = re.match(r"(\$?[\w$]+):$", text)
        if label:
            program.labels[label[1]] = len(program.code)
        elif text and not text.startswith("."):
            program.code += [_instruction(one.strip(), source) for one in text.split(";") if one.strip(" {}")]
    return program


def _instruction(text: str, source: str) -> Instruction:
    guard, rest = text[1:].split(None, 1) if text.startswith("@") else (None, text)
    name, _, operands = rest.replace("\t", " ").partition(" ")
    return Instruction(guard, tuple(name.split(".")), _split(operands), text, source)


def _split(text: str) -> tuple[str, ...]:
    """At commas outside of braces and brackets."""
    found, depth, current = [], 0, ""
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            found.append(current.strip())
            current = ""
        else:
            current += letter
    return (*found, current.strip()) if current.strip() else tuple(found)


def listed(text: str) -> list[str]:
    """``{a, b}`` or ``a`` as a list."""
    return [one.strip() for one in text.strip("{} ").split(",")]
