"""Translate nvcc's PTX to C++ that runs on cuda_shim.h: one statement for each instruction.

    cd tests && python -m cuda_on_cpu.ptx_to_cpp kernels.ptx > kernels.cpp

A kernel becomes a function with the kernel's mangled name, so a program that declares the kernels links against it
instead of against their source. What runs is what NVIDIA's compiler made of the device code: the branches for
__CUDA_ARCH__, the device's conversions and intrinsics, and every contraction it chose.

An opcode, modifier, directive or operand that is not known is a TranslationError, never skipped.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path


class TranslationError(Exception):
    """Something in the PTX that this translator does not know."""


# ---- types

BITS = {8: "uint8_t", 16: "uint16_t", 32: "uint32_t", 64: "uint64_t"}
TYPES = {f"{kind}{bits}": f"{prefix}{bits}_t" for kind, prefix in (("b", "uint"), ("u", "uint"), ("s", "int"))
         for bits in BITS}  # fmt: skip
TYPES |= {"f32": "float", "f64": "double", "pred": "bool"}
# Pairs and numbers of 16 bits have no C++ type; they are moved as bits and converted by functions of the runtime.
TYPES |= {"f16": "uint16_t", "bf16": "uint16_t", "f16x2": "uint32_t", "bf16x2": "uint32_t"}
NUMBERS = {"f32", "f64"}
HALVES = {"f16", "bf16", "f16x2", "bf16x2"}


WIDTHS = {kind: int(re.sub(r"\D", "", kind) or 1) for kind in TYPES} | {"f16x2": 32, "bf16x2": 32}


def width(kind: str) -> int:
    """Bits of a PTX type."""
    return WIDTHS[kind]


def signed(kind: str) -> bool:
    return kind.startswith("s")


def arithmetic_type(kind: str) -> str:
    """Where integer results wrap: unsigned, and at least as wide as int, to which C++ would promote."""
    return BITS[max(width(kind), 32)]


# ---- statements


@dataclasses.dataclass
class Statement:
    """A label, a directive or an instruction of a kernel's body."""

    line: int
    text: str
    scope: tuple[int, ...]  # nested braces around it, which may hold registers of their own


@dataclasses.dataclass
class Parameter:
    name: str
    kind: str
    bytes: int | None  # of a struct, None for a scalar
    alignment: int


@dataclasses.dataclass
class Kernel:
    name: str
    parameters: list[Parameter]
    max_threads: int | None
    statements: list[Statement]


class Instruction:
    """An opcode with modifiers that must all be used up, and its operands."""

    def __init__(self, statement: Statement) -> None:
        match = re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z0-9]+)((?:\.[\w:]+)*)\s*(.*)", statement.text, re.S)
        if not match:
            raise TranslationError(f"line {statement.line}: cannot read {statement.text!r}")
        self.line = statement.line
        self.negated, self.guard = bool(match[1]), match[2]
        self.opcode = match[3]
        self.modifiers = match[4].split(".")[1:]
        self.operands = split_operands(match[5])

    def take(self, *names: str) -> str | None:
        """The first modifier that is one of `names`, used up; None if there is none."""
        for name in self.modifiers:
            if name in names:
                self.modifiers.remove(name)
                return name
        return None

    def need(self, *names: str) -> str:
        taken = self.take(*names)
        if taken is None:
            raise TranslationError(f"line {self.line}: {self.opcode} needs one of {', '.join(names)}")
        return taken

    def type(self, *allowed: str) -> str:
        """The last modifier, which is the type; the one before it is then the last."""
        kind = self.modifiers.pop() if self.modifiers else ""
        if kind not in TYPES or (allowed and kind not in allowed):
            raise TranslationError(f"line {self.line}: {self.opcode} of type {kind or 'none'} is not known")
        return kind

    def expect(self, count: int) -> list[str]:
        if len(self.operands) != count:
            raise TranslationError(f"line {self.line}: {self.opcode} with {len(self.operands)} operands")
        return self.operands


def split_operands(text: str) -> list[str]:
    """Split at commas outside of braces."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|[^,{])+", text)]


# ---- reading PTX

ENTRY = re.compile(r"(?:\.visible|\.weak)\s+\.entry\s+(\w+)\s*\(([^)]*)\)([^{]*)\{")
IGNORED_MODULE_LINES = re.compile(r"\.(version|target|address_size|file)\b[^\n]*")
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr(?:\s+\.(?:global|const|shared|local))?(?:\s+\.align\s+\d+)?)?"
    r"\s+(\w+)(?:\[(\d+)\])?"
)


SPACE = re.compile(r"\s*")
LABEL = re.compile(r"(\$?\w+):(?!:)")


def blank_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def read_parameter(text: str) -> Parameter:
    match = PARAMETER.fullmatch(text)
    if not match:
        raise TranslationError(f"cannot read parameter {text!r}")
    return Parameter(match[3], match[2], int(match[4]) if match[4] else None, int(match[1] or 1))


def read_max_threads(name: str, directives: str) -> int | None:
    """The largest block that __launch_bounds__ allows."""
    found = None
    for directive in directives.split("\n"):
        directive = directive.strip()
        if match := re.fullmatch(r"\.maxntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", directive):
            found = int(match[1]) * int(match[2] or 1) * int(match[3] or 1)
        elif directive and not re.fullmatch(r"\.(minnctapersm|maxnreg)\s+\d+", directive):
            raise TranslationError(f"{name}: unknown directive {directive!r}")
    return found


def read_statements(text: str, first_line: int) -> tuple[list[Statement], int]:
    """The statements from after a kernel's opening brace on, and how much text they and the closing brace take."""
    statements: list[Statement] = []
    scopes, scope_count = [0], 0
    at, line, counted = 0, first_line, 0
    while scopes:
        at = SPACE.match(text, at).end()
        line, counted = line + text.count("\n", counted, at), at
        if at >= len(text):
            raise TranslationError(f"line {line}: a kernel has no end")
        if text[at] == "{":
            scope_count += 1
            scopes.append(scope_count)
            at += 1
        elif text[at] == "}":
            scopes.pop()
            at += 1
        elif match := LABEL.match(text, at):
            statements.append(Statement(line, match[0], tuple(scopes)))
            at = match.end()
        else:
            end = text.index(";", at)
            statements.append(Statement(line, " ".join(text[at:end].split()), tuple(scopes)))
            at = end + 1
    return statements, at


def read_kernels(ptx: str) -> Iterator[Kernel]:
    text = blank_comments(ptx)
    at = 0
    while match := ENTRY.search(text, at):
        check_between_kernels(text[at : match.start()])
        parameters = [read_parameter(part) for part in split_operands(" ".join(match[2].split()))]
        line = 1 + text.count("\n", 0, match.end())
        # A kernel's end is found by counting braces in what follows; the next kernel bounds the search.
        following = ENTRY.search(text, match.end())
        body = text[match.end() : following.start() if following else len(text)]
        statements, length = read_statements(body, line)
        yield Kernel(match[1], parameters, read_max_threads(match[1], match[3]), statements)
        at = match.end() + length
    check_between_kernels(text[at:])


def check_between_kernels(text: str) -> None:
    rest = IGNORED_MODULE_LINES.sub("", text).strip()
    if rest:
        raise TranslationError(f"unknown statement outside of kernels: {rest[:80]!r}")


# ---- translating

Handler = Callable[["KernelTranslator", Instruction], str]
HANDLERS: dict[str, Handler] = {}


def opcode(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


SPECIAL_REGISTERS = {
    f"%{register}.{axis}": f"ptx::{function}().{axis}"
    for register, function in (("tid", "thread_index"), ("ntid", "block_size"), ("ctaid", "block_index"),
                               ("nctaid", "grid_size"))
    for axis in "xyz"
}  # fmt: skip

SHARED_GAP = 64  # between the arrays of a block, where ASan can see an overrun


class KernelTranslator:
    """The state of one kernel's translation."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.register_ranges: dict[str, tuple[str, int]] = {}  # prefix: type, count
        self.scoped_registers: dict[tuple[int, str], tuple[str, str]] = {}  # scope, name: C++ name, type
        self.used: dict[str, str] = {}  # C++ name: type, in order of first use
        self.shared: dict[str, int] = {}  # array: offset
        self.shared_arrays: list[tuple[int, int]] = []  # offset, bytes
        self.locals: dict[str, tuple[int, int]] = {}  # array: bytes, alignment
        self.branch_targets: dict[str, list[str]] = {}
        self.parameters = {parameter.name: f"parameter{i}" for i, parameter in enumerate(kernel.parameters)}
        self.scope: tuple[int, ...] = ()
        self.line = 0

    def error(self, what: str) -> TranslationError:
        return TranslationError(f"{self.kernel.name}, line {self.line}: {what}")

    # -- operands

    def register(self, name: str) -> tuple[str, str]:
        """C++ name and PTX type."""
        for scope in reversed(self.scope) if self.scoped_registers else ():
            if found := self.scoped_registers.get((scope, name)):
                return self.declare(*found)
        if (kind := self.used.get(name[1:])) and name[0] == "%":
            return name[1:], kind
        match = re.fullmatch(r"%(\w*?)(\d+)", name)
        if match and match[1] in self.register_ranges and int(match[2]) < self.register_ranges[match[1]][1]:
            return self.declare(name[1:], self.register_ranges[match[1]][0])
        raise self.error(f"unknown operand {name!r}")

    def declare(self, name: str, kind: str) -> tuple[str, str]:
        self.used.setdefault(name, kind)
        return name, kind

    def value(self, operand: str, kind: str) -> str:
        """An operand as a C++ expression of the C++ type of `kind`."""
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return self.from_bits(f"0x{match[1]}u", 32, kind)
        if match := re.fullmatch(r"0[dD]([0-9a-fA-F]{16})", operand):
            return self.from_bits(f"0x{match[1]}ull", 64, kind)
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            if kind in NUMBERS:
                return self.from_bits(f"{BITS[width(kind)]}({operand.rstrip('U')})", width(kind), kind)
            return self.integer(int(operand.rstrip("U"), 0), kind)
        if operand in SPECIAL_REGISTERS:
            return f"{TYPES[kind]}({SPECIAL_REGISTERS[operand]})"
        if operand in self.parameters or operand in self.locals:
            return self.address_of(operand)
        if operand in self.shared:
            return f"{TYPES[kind]}({self.shared[operand]})"
        name, have = self.register(operand)
        if width(have) == width(kind):
            return self.from_bits(name, width(have), kind, have)
        if width(have) < width(kind) or have in NUMBERS or have == "pred":
            raise self.error(f"{operand} is too narrow for type {kind}")
        return f"{TYPES[kind]}({name})"  # the low bits

    def integer(self, value: int, kind: str) -> str:
        """A literal, written so that the compiler sees the bits that a register of this type would hold."""
        if kind == "pred":
            return "true" if value else "false"
        bits = value & (2 ** width(kind) - 1)
        if signed(kind) and bits >> (width(kind) - 1):
            return f"{TYPES[kind]}({bits - 2 ** width(kind)}ll)" if bits != 2**63 else "INT64_MIN"
        return f"{TYPES[kind]}({bits}{'ull' if bits > 2**31 - 1 else ''})"

    def from_bits(self, expression: str, bits: int, kind: str, have: str | None = None) -> str:
        if bits != width(kind):
            raise self.error(f"{expression} has not the width of type {kind}")
        have_type = TYPES[have] if have else BITS[bits]
        if have_type == TYPES[kind]:
            return expression
        if "float" in (have_type, TYPES[kind]) or "double" in (have_type, TYPES[kind]):
            return f"__builtin_bit_cast({TYPES[kind]}, {expression})"
        return f"{TYPES[kind]}({expression})"

    def put(self, operand: str, expression: str, kind: str) -> str:
        """Assign an expression of the C++ type of `kind`; a wider register takes it extended."""
        if operand == "_":
            return f"(void)({expression});"
        name, have = self.register(operand)
        if width(have) == width(kind):
            return f"{name} = {self.from_bits(expression, width(kind), have, kind)};"
        if width(have) < width(kind) or have in NUMBERS or kind in NUMBERS or kind == "pred":
            raise self.error(f"{operand} does not fit type {kind}")
        extended = f"int{width(have)}_t" if signed(kind) else BITS[width(have)]
        return f"{name} = {TYPES[have]}({extended}({TYPES[kind]}({expression})));"

    def address_of(self, symbol: str) -> str:
        if symbol in self.parameters:
            return f"ptx::address_of({self.parameters[symbol]})"
        return f"{symbol}.address()"

    def address(self, operand: str, space: str) -> str:
        match = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", operand)
        if not match:
            raise self.error(f"cannot read address {operand}")
        base, offset = match[1], int(match[2] or 0)
        if base in self.shared:
            if space != "shared":
                raise self.error(f"{base} is in shared memory")
            return f"shared + {self.shared[base] + offset}"
        if base in self.parameters or base in self.locals:
            start = self.address_of(base)
        elif space == "shared":
            start = f"shared + {self.value(base, 'b' + str(width(self.register(base)[1])))}"
        else:
            start = self.value(base, "b64")
        if offset == 0:
            return start
        return f"{start} + {offset}" if offset > 0 else f"{start} - {-offset}"

    # -- statements

    def directive(self, text: str) -> None:
        if match := re.fullmatch(r"\.reg \.(\w+) (.+)", text):
            for name in match[2].split(","):
                self.declare_registers(match[1], name.strip())
        elif match := re.fullmatch(r"\.shared \.align (\d+) \.b8 (\w+)\[(\d+)\]", text):
            self.declare_shared(match[2], int(match[3]), int(match[1]))
        elif match := re.fullmatch(r"\.local \.align (\d+) \.b8 (\w+)\[(\d+)\]", text):
            self.locals[match[2]] = (int(match[3]), int(match[1]))
        elif not re.fullmatch(r"\.pragma \"nounroll\"|\.loc .*", text):
            raise self.error(f"unknown directive {text!r}")

    def declare_registers(self, kind: str, name: str) -> None:
        if kind not in TYPES:
            raise self.error(f"registers of type {kind} are not known")
        if match := re.fullmatch(r"%(\w+)<(\d+)>", name):
            self.register_ranges[match[1]] = (kind, int(match[2]))
        else:
            scope = self.scope[-1]
            self.scoped_registers[scope, name] = (f"{name.lstrip('%')}_in{scope}", kind)

    def declare_shared(self, name: str, size: int, alignment: int) -> None:
        end = sum(self.shared_arrays[-1]) + SHARED_GAP if self.shared_arrays else 0
        offset = -(-end // alignment) * alignment
        self.shared[name] = offset
        self.shared_arrays.append((offset, size))

    def instruction(self, statement: Statement) -> str:
        ins = Instruction(statement)
        handler = HANDLERS.get(ins.opcode)
        if handler is None:
            raise self.error(f"unknown opcode {statement.text!r}")
        code = handler(self, ins)
        if ins.modifiers:
            raise self.error(f"unknown modifier .{ins.modifiers[0]} of {statement.text!r}")
        if ins.guard:
            return f"if ({'!' if ins.negated else ''}{self.value(ins.guard, 'pred')}) {{ {code} }}"
        return code

    def statement(self, statement: Statement) -> str | None:
        self.line, self.scope = statement.line, statement.scope
        text = statement.text
        if text.endswith(":"):
            return f"{label(text[:-1])}:;"
        if text.startswith("."):
            self.directive(text)
            return None
        return f"  {self.instruction(statement)}  // {statement.line}: {text}"

    def read_branch_targets(self) -> list[Statement]:
        """Takes the tables of indexed branches, which are labels followed by a directive, out of the statements."""
        rest: list[Statement] = []
        for statement in self.kernel.statements:
            if match := re.fullmatch(r"\.branchtargets (.+)", statement.text):
                self.branch_targets[rest.pop().text[:-1]] = [name.strip() for name in match[1].split(",")]
            else:
                rest.append(statement)
        return rest

    def translate(self) -> str:
        statements = self.read_branch_targets()
        body = [code for statement in statements if (code := self.statement(statement)) is not None]
        signature = ", ".join(self.parameter(i, p) for i, p in enumerate(self.kernel.parameters))
        name = self.kernel.name
        lines = [f'void {name}_translated({signature}) asm("{name}");', f"void {name}_translated({signature}) {{"]
        if self.kernel.max_threads:
            lines.append(f"  ptx::check_block_size({self.kernel.max_threads});")
        lines += self.memory_declarations()
        lines += self.register_declarations()
        return "\n".join([*lines, *body, "}", ""])

    def parameter(self, index: int, parameter: Parameter) -> str:
        if parameter.bytes is None:
            return f"{TYPES[parameter.kind]} parameter{index}"
        if parameter.bytes <= 16:  # may come in registers of either kind, depending on its members
            raise self.error(f"a struct parameter of {parameter.bytes} bytes is not modelled")
        return f"ptx::Struct<{parameter.bytes}, {parameter.alignment}> parameter{index}"

    def register_declarations(self) -> list[str]:
        names: dict[str, list[str]] = {}  # of each C++ type
        for name, kind in self.used.items():
            names.setdefault(TYPES[kind], []).append(f"{name} = {UNSET[TYPES[kind]]}")
        return [f"  {kind} {', '.join(declared)};" for kind, declared in names.items()]

    def memory_declarations(self) -> list[str]:
        lines = [f"  ptx::LocalArray {name}({size}, {align});" for name, (size, align) in self.locals.items()]
        if self.shared_arrays:
            arrays = ", ".join(f"{{{offset}, {size}}}" for offset, size in self.shared_arrays)
            lines.append(f"  static const ptx::SharedArray arrays[] = {{{arrays}}};")
            lines.append(f"  const uint64_t shared = ptx::shared_window(arrays, {len(self.shared_arrays)});")
        return lines


# What registers hold before they are written: a value that spoils every result.
UNSET = {"bool": "false", "float": "__builtin_nanf(\"\")", "double": "__builtin_nan(\"\")", "uint8_t": "0xDB",
         "uint16_t": "0xDBDB", "uint32_t": "0xDBDBDBDB", "uint64_t": "0xDBDBDBDBDBDBDBDB",
         "int8_t": "0", "int16_t": "0", "int32_t": "0", "int64_t": "0"}  # fmt: skip


def label(name: str) -> str:
    return name.replace("$", "")


# ---- moving


def elements(operand: str) -> list[str]:
    """The registers of a vector operand."""
    return [part.strip() for part in operand.strip("{}").split(",")]


@opcode("mov")
def mov(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type()
    to, source = ins.expect(2)
    if to.startswith("{"):
        parts = elements(to)
        bits = width(kind) // len(parts)
        whole = k.value(source, f"b{width(kind)}")
        return " ".join(k.put(part, f"{BITS[bits]}({whole} >> {i * bits})", f"b{bits}") for i, part in enumerate(parts))
    if source.startswith("{"):
        parts = elements(source)
        bits = width(kind) // len(parts)
        whole = BITS[width(kind)]
        packed = " | ".join(f"{whole}({k.value(part, f'b{bits}')}) << {i * bits}" for i, part in enumerate(parts))
        return k.put(to, f"{whole}({packed})", f"b{width(kind)}")
    return k.put(to, k.value(source, kind), kind)


@opcode("cvta")
def cvta(k: KernelTranslator, ins: Instruction) -> str:
    """Between generic addresses and those of a space; only shared ones differ here."""
    kind = ins.type("u64")
    to_space = ins.take("to")
    space = ins.need("global", "local", "shared", "param", "const")
    to, source = ins.expect(2)
    address = k.value(source, kind)
    if space == "shared":
        address = f"{address} - shared" if to_space else f"{address} + shared"
    return k.put(to, address, kind)


def take_space_and_hints(ins: Instruction) -> str:
    """The state space; caching says nothing about values. Generic addresses are those of the host."""
    ins.take("weak", "volatile")
    space = ins.take("global", "shared", "local", "param") or "generic"
    ins.take("nc")
    ins.take("ca", "cg", "cs", "lu", "cv", "wb", "wt")
    ins.take("L1::evict_normal", "L1::evict_last", "L1::evict_first", "L1::no_allocate")
    ins.take("L2::64B", "L2::128B", "L2::256B")
    return space


@opcode("ld")
def ld(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type()
    count = int((ins.take("v2", "v4") or "v1")[1:])
    space = take_space_and_hints(ins)
    to, address = ins.expect(2)
    if count == 1:
        return k.put(to, f"ptx::load<{TYPES[kind]}>({k.address(address, space)})", kind)
    puts = " ".join(k.put(part, f"values[{i}]", kind) for i, part in enumerate(elements(to)))
    return f"{{ {TYPES[kind]} values[{count}]; ptx::load_vector({k.address(address, space)}, values); {puts} }}"


@opcode("st")
def st(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type()
    count = int((ins.take("v2", "v4") or "v1")[1:])
    space = take_space_and_hints(ins)
    address, source = ins.expect(2)
    if count == 1:
        return f"ptx::store<{TYPES[kind]}>({k.address(address, space)}, {k.value(source, kind)});"
    values = ", ".join(k.value(part, kind) for part in elements(source))
    return f"{{ const {TYPES[kind]} values[] = {{{values}}}; ptx::store_vector({k.address(address, space)}, values); }}"


# ---- integers and numbers


def need_rounding(ins: Instruction) -> None:
    """Without .rn, ptxas may fuse a multiplication with an addition: the result would be its choice."""
    ins.need("rn")


def binary(k: KernelTranslator, ins: Instruction, kind: str, operator: str) -> str:
    """Arithmetic that wraps."""
    to, a, b = ins.expect(3)
    if kind in NUMBERS:
        return k.put(to, f"ptx::result({k.value(a, kind)} {operator} {k.value(b, kind)})", kind)
    t = arithmetic_type(kind)
    return k.put(to, f"{TYPES[kind]}({t}({k.value(a, kind)}) {operator} {t}({k.value(b, kind)}))", kind)


@opcode("add", "sub")
def add_sub(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64")
    if kind in NUMBERS:
        need_rounding(ins)
    return binary(k, ins, kind, {"add": "+", "sub": "-"}[ins.opcode])


def product(k: KernelTranslator, a: str, b: str, kind: str, part: str) -> tuple[str, str]:
    """The low or high half, or all of a product; expression and type."""
    x, y = k.value(a, kind), k.value(b, kind)
    if part == "lo":
        t = arithmetic_type(kind)
        return f"{TYPES[kind]}({t}({x}) * {t}({y}))", kind
    if width(kind) == 64:
        if part == "wide":
            raise k.error("products of 128 bits are not modelled")
        wide = "ptx::int128_t" if signed(kind) else "ptx::uint128_t"
    else:
        wide = f"{'int' if signed(kind) else 'uint'}{2 * width(kind)}_t"
    whole = f"{wide}({x}) * {wide}({y})" if width(kind) > 16 else f"{wide}({wide}({x}) * {wide}({y}))"
    if part == "hi":
        return f"{TYPES[kind]}(({whole}) >> {width(kind)})", kind
    return f"({whole})", f"{kind[0]}{2 * width(kind)}"


@opcode("mul")
def mul(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64")
    if kind in NUMBERS:
        need_rounding(ins)
        return binary(k, ins, kind, "*")
    to, a, b = ins.expect(3)
    return k.put(to, *product(k, a, b, kind, ins.need("lo", "hi", "wide")))


@opcode("mad")
def mad(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("u16", "s16", "u32", "s32", "u64", "s64")
    to, a, b, c = ins.expect(4)
    expression, result = product(k, a, b, kind, ins.need("lo", "hi", "wide"))
    t = arithmetic_type(result)
    return k.put(to, f"{TYPES[result]}({t}({expression}) + {t}({k.value(c, result)}))", result)


@opcode("fma")
def fma(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("f32", "f64")
    need_rounding(ins)
    to, *terms = ins.expect(4)
    function = "__builtin_fmaf" if kind == "f32" else "__builtin_fma"
    return k.put(to, f"ptx::result({function}({', '.join(k.value(term, kind) for term in terms)}))", kind)


@opcode("div")
def div(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64")
    to, a, b = ins.expect(3)
    if kind in NUMBERS:
        need_rounding(ins)
        return k.put(to, f"{k.value(a, kind)} / {k.value(b, kind)}", kind)
    return k.put(to, f"ptx::divide({k.value(a, kind)}, {k.value(b, kind)})", kind)


@opcode("rem")
def rem(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("u16", "s16", "u32", "s32", "u64", "s64")
    to, a, b = ins.expect(3)
    return k.put(to, f"ptx::remainder({k.value(a, kind)}, {k.value(b, kind)})", kind)


@opcode("rcp", "sqrt")
def rcp_sqrt(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("f32", "f64")
    need_rounding(ins)
    to, a = ins.expect(2)
    x = k.value(a, kind)
    root = "__builtin_sqrtf" if kind == "f32" else "__builtin_sqrt"
    return k.put(to, f"{TYPES[kind]}(1) / {x}" if ins.opcode == "rcp" else f"{root}({x})", kind)


@opcode("neg")
def neg(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("s16", "s32", "s64", "f32", "f64")
    to, a = ins.expect(2)
    if kind in NUMBERS:
        return k.put(to, f"-{k.value(a, kind)}", kind)
    return k.put(to, f"{TYPES[kind]}(0 - {arithmetic_type(kind)}({k.value(a, kind)}))", kind)


@opcode("abs")
def absolute(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("s16", "s32", "s64", "f32", "f64")
    to, a = ins.expect(2)
    function = {"f32": "__builtin_fabsf", "f64": "__builtin_fabs"}.get(kind, "ptx::magnitude")
    return k.put(to, f"{function}({k.value(a, kind)})", kind)


@opcode("min", "max")
def min_max(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("u16", "s16", "u32", "s32", "u64", "s64", "f32", "f64")
    to, a, b = ins.expect(3)
    return k.put(to, f"ptx::{ins.opcode}imum({k.value(a, kind)}, {k.value(b, kind)})", kind)


# ---- bits


@opcode("and", "or", "xor")
def bitwise(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b16", "b32", "b64", "pred")
    to, a, b = ins.expect(3)
    operator = {"and": "&", "or": "|", "xor": "^"}[ins.opcode]
    return k.put(to, f"{TYPES[kind]}({k.value(a, kind)} {operator} {k.value(b, kind)})", kind)


@opcode("not")
def bitwise_not(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b16", "b32", "b64", "pred")
    to, a = ins.expect(2)
    return k.put(to, f"!{k.value(a, kind)}" if kind == "pred" else f"{TYPES[kind]}(~{k.value(a, kind)})", kind)


@opcode("shl", "shr")
def shift(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type(*(("b16", "b32", "b64") if ins.opcode == "shl" else
                      ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")))  # fmt: skip
    to, a, by = ins.expect(3)
    x = k.value(a, kind)
    if re.fullmatch(r"\d+", by) and int(by) < width(kind):  # the common case, without a call
        operator = "<<" if ins.opcode == "shl" else ">>"
        return k.put(to, f"{TYPES[kind]}({x} {operator} {by})", kind)
    function = "shift_left" if ins.opcode == "shl" else "shift_right"
    return k.put(to, f"ptx::{function}({x}, {k.value(by, 'b32')})", kind)


@opcode("shf")
def funnel_shift(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b32")
    direction, mode = ins.need("l", "r"), ins.need("wrap", "clamp")
    to, low, high, by = ins.expect(4)
    amount = f"ptx::{mode}_shift({k.value(by, kind)})"
    function = "funnel_left" if direction == "l" else "funnel_right"
    return k.put(to, f"ptx::{function}({k.value(low, kind)}, {k.value(high, kind)}, {amount})", kind)


@opcode("bfe")
def bit_field_extract(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("u32", "u64")
    to, a, at, count = ins.expect(4)
    return k.put(to, f"ptx::extract_bits({k.value(a, kind)}, {k.value(at, 'u32')}, {k.value(count, 'u32')})", kind)


@opcode("bfi")
def bit_field_insert(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b32", "b64")
    to, a, b, at, count = ins.expect(5)
    arguments = f"{k.value(a, kind)}, {k.value(b, kind)}, {k.value(at, 'u32')}, {k.value(count, 'u32')}"
    return k.put(to, f"ptx::insert_bits({arguments})", kind)


@opcode("prmt")
def permute(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b32")
    to, *operands = ins.expect(4)
    return k.put(to, f"ptx::permute({', '.join(k.value(operand, kind) for operand in operands)})", kind)


@opcode("brev")
def brev(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b32")
    to, a = ins.expect(2)
    return k.put(to, f"ptx::reversed({k.value(a, kind)})", kind)


@opcode("bfind")
def bfind(k: KernelTranslator, ins: Instruction) -> str:
    ins.need("shiftamt")
    kind = ins.type("u32")
    to, a = ins.expect(2)
    return k.put(to, f"ptx::shift_to_top({k.value(a, kind)})", kind)


@opcode("popc", "clz")
def count_bits(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b32", "b64")
    to, a = ins.expect(2)
    function = "count_ones" if ins.opcode == "popc" else "leading_zeros"
    return k.put(to, f"ptx::{function}({k.value(a, kind)})", "u32")


# ---- choosing

COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def comparison(k: KernelTranslator, name: str, a: str, b: str, kind: str) -> str:
    x, y = k.value(a, kind), k.value(b, kind)
    if name in ("num", "nan"):
        return f"{'!' if name == 'num' else ''}__builtin_isunordered({x}, {y})"
    if name in COMPARISONS:
        return f"{x} {COMPARISONS[name]} {y}" if name != "ne" or kind not in NUMBERS else f"({x} < {y} || {x} > {y})"
    if kind in NUMBERS:
        return f"(__builtin_isunordered({x}, {y}) || {x} {COMPARISONS[name[:-1]]} {y})"
    return f"{x} {COMPARISONS[UNSIGNED_NAMES[name]]} {y}"


@opcode("setp")
def setp(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
    number_names = [name + "u" for name in COMPARISONS] + ["num", "nan"]
    name = ins.need(*COMPARISONS, *(number_names if kind in NUMBERS else UNSIGNED_NAMES))
    combine = ins.take("and", "or", "xor")
    to, a, b, *rest = ins.expect(4 if combine else 3)
    result = comparison(k, name, a, b, kind)
    opposite = f"!({result})"
    if combine:
        negated = rest[0].startswith("!")
        other = ("!" if negated else "") + k.value(rest[0].lstrip("!"), "pred")
        operator = {"and": "&", "or": "|", "xor": "^"}[combine]
        result, opposite = f"bool(({result}) {operator} {other})", f"bool(({opposite}) {operator} {other})"
    first, *second = to.split("|")
    if not second:
        return k.put(first, result, "pred")
    puts = f"{k.put(first, 'yes', 'pred')} {k.put(second[0], 'no', 'pred')}"
    return f"{{ const bool yes = {result}, no = {opposite}; {puts} }}"


@opcode("selp")
def selp(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")
    to, a, b, which = ins.expect(4)
    return k.put(to, f"{k.value(which, 'pred')} ? {k.value(a, kind)} : {k.value(b, kind)}", kind)


# ---- converting

INTEGER_ROUNDING = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


@opcode("cvt")
def cvt(k: KernelTranslator, ins: Instruction) -> str:
    source_kind, kind = ins.type(), ins.type()
    if kind in ("f16x2", "bf16x2"):
        need_rounding(ins)
        if source_kind != "f32":
            raise k.error(f"no conversion from {source_kind} to {kind}")
        to, high, low = ins.expect(3)
        return k.put(to, f"ptx::to_{kind}({k.value(high, 'f32')}, {k.value(low, 'f32')})", kind)
    to, a = ins.expect(2)
    return k.put(to, converted(k, ins, k.value(a, source_kind), source_kind, kind), kind)


def converted(k: KernelTranslator, ins: Instruction, x: str, source_kind: str, kind: str) -> str:
    if source_kind in HALVES or kind in HALVES:
        if (source_kind, kind) in (("f16", "f32"), ("bf16", "f32")):
            return f"ptx::from_{source_kind}({x})"
        if (source_kind, kind) in (("f32", "f16"), ("f32", "bf16")):
            need_rounding(ins)
            return f"ptx::to_{kind}({x})"
        raise k.error(f"no conversion from {source_kind} to {kind}")
    if source_kind in NUMBERS and kind in NUMBERS:
        if width(kind) > width(source_kind):
            return f"{TYPES[kind]}({x})"
        if width(kind) < width(source_kind):
            need_rounding(ins)
            return f"{TYPES[kind]}({x})"
        return f"ptx::{INTEGER_ROUNDING[ins.need(*INTEGER_ROUNDING)]}_of({x})"
    if source_kind in NUMBERS:
        whole = f"ptx::{INTEGER_ROUNDING[ins.need(*INTEGER_ROUNDING)]}_of({x})"
        return f"ptx::to_integer<{TYPES[kind]}>({whole})"
    if kind in NUMBERS:
        need_rounding(ins)
    return f"{TYPES[kind]}({x})"


# ---- memory shared with other threads

ATOMICS = {"add": "add", "min": "minimum", "max": "maximum", "exch": "exchange", "cas": "compare_and_swap",
           "and": "bit_and", "or": "bit_or"}  # fmt: skip


@opcode("atom", "red")
def atom(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64")
    ins.take("relaxed")
    ins.take("cta", "gpu", "sys")
    space = ins.take("global", "shared") or "generic"
    operation = ins.need(*ATOMICS)
    operands = ins.expect((4 if operation == "cas" else 3) - (1 if ins.opcode == "red" else 0))
    to, address, *values = operands if ins.opcode == "atom" else ["_", *operands]
    arguments = ", ".join(k.value(value, kind) for value in values)
    return k.put(to, f"ptx::atomic_{ATOMICS[operation]}<{TYPES[kind]}>({k.address(address, space)}, {arguments})", kind)


@opcode("activemask")
def activemask(k: KernelTranslator, ins: Instruction) -> str:
    kind = ins.type("b32")
    (to,) = ins.expect(1)
    return k.put(to, f"ptx::active_mask({ins.line})", kind)


@opcode("shfl")
def shfl(k: KernelTranslator, ins: Instruction) -> str:
    ins.need("sync")
    ins.need("idx")
    kind = ins.type("b32")
    to, a, lane, clamp, mask = ins.expect(5)
    arguments = ", ".join(k.value(operand, kind) for operand in (mask, a, lane, clamp))
    register, *valid = to.split("|")
    said = k.put(valid[0], "true", "pred") if valid else ""  # a lane outside of the mask stops the program
    return f"{k.put(register, f'ptx::shuffle({arguments}, {ins.line})', kind)} {said}"


@opcode("membar")
def membar(k: KernelTranslator, ins: Instruction) -> str:
    ins.need("cta", "gl", "sys")
    ins.expect(0)
    return "ptx::fence();"


@opcode("fence")
def fence(k: KernelTranslator, ins: Instruction) -> str:
    ins.need("sc", "acq_rel")
    ins.need("cta", "gpu", "sys")
    ins.expect(0)
    return "ptx::fence();"


@opcode("bar", "barrier")
def bar(k: KernelTranslator, ins: Instruction) -> str:
    ins.take("cta")
    ins.need("sync")
    ins.take("aligned")
    if ins.expect(1) != ["0"]:
        raise k.error("only barrier 0, for the whole block, is modelled")
    return f"ptx::barrier({ins.line});"


# ---- control


@opcode("bra")
def bra(k: KernelTranslator, ins: Instruction) -> str:
    ins.take("uni")
    (target,) = ins.expect(1)
    return f"goto {label(target)};"


@opcode("brx")
def brx(k: KernelTranslator, ins: Instruction) -> str:
    ins.need("idx")
    ins.take("uni")
    index, table = ins.expect(2)
    if table not in k.branch_targets:
        raise k.error(f"unknown table of branches {table}")
    cases = " ".join(f"case {i}: goto {label(target)};" for i, target in enumerate(k.branch_targets[table]))
    return f'switch ({k.value(index, "u32")}) {{ {cases} default: ptx::fail("branch out of its table", {ins.line}); }}'


@opcode("ret", "exit")
def ret(k: KernelTranslator, ins: Instruction) -> str:
    ins.take("uni")
    ins.expect(0)
    return "return;"


@opcode("trap")
def trap(k: KernelTranslator, ins: Instruction) -> str:
    ins.expect(0)
    return f'ptx::fail("trap", {ins.line});'


# ---- the whole

PRELUDE = '#include "ptx_runtime.h"\n\n'


def translate(ptx: str) -> dict[str, str]:
    """Kernel name -> the C++ function that stands for it; each compiles on its own after PRELUDE."""
    return {kernel.name: KernelTranslator(kernel).translate() for kernel in read_kernels(ptx)}


if __name__ == "__main__":
    print(PRELUDE + "\n".join(translate(Path(sys.argv[1]).read_text()).values()))
