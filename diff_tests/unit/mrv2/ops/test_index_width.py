"""No address is computed in 32 bits from a row and a stride: 16,000 rows of 151,936 are too many.

Read from the compiler's own intermediate code, kernel by kernel, since a fault of this kind shows
with gigabytes alone. A 32-bit product that an address is made of must have a small compile-time
factor, such as the size of a block, or be listed here with the reason why it stays small.
"""

import re
from collections.abc import Iterator

import pytest
import triton
import triton.language as tl
from torch import Tensor, zeros
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mrv2.ops.launch import Launch
from mrv2.ops.twin import INTERPRETED
from mrv2_diff.samples import SAMPLES, all_ops, samples_of

pytestmark = pytest.mark.skipif(
    INTERPRETED, reason="kernels of a session under TRITON_INTERPRET=1 cannot be compiled"
)

SMALL = {
    "_draw_kernel": {"first_id": "program * tokens of its share: a token id"},
    "_summarize_kernel": {"begin": "program * tokens of its split: a token id"},
    "_cut_to_top_kernel": {"token_ids": "run of the sample * distance of runs: a token id"},
}
"""By kernel and name of the product, why it stays in 32 bits: no vocabulary is as large."""
MAX_FACTOR = 1 << 14
"""A larger constant is a stride in disguise."""

_DEFINITION = re.compile(r"^\s*(%[\w]+)(?::\d+)? = (\S+) (.*)$", re.MULTILINE)
_NAME = re.compile(r"%\w+")
_CONSTANT = re.compile(r"(%\w+) = arith\.constant (?:dense<)?(-?\d+)")
_ADDRESS = re.compile(r"= tt\.addptr %\w+, (%\w+)")
_LOOP = re.compile(r"iter_args\((.*?)\) ->")
_CARRIES = {"arith.addi", "arith.subi", "arith.extsi", "arith.muli", "tt.splat", "tt.broadcast"}
_CARRIES |= {"tt.expand_dims", "arith.select", "arith.trunci", "arith.maxsi", "arith.minsi", "loop"}


def intermediate_code(launch: Launch) -> str:
    names = list(launch.kernel.arg_names)
    source = ASTSource(
        launch.kernel,
        signature=launch.signature(),
        constexprs={(names.index(name),): value for name, value in launch.constexprs.items()},
    )
    options = {"num_warps": launch.num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return str(compiled.asm["ttir"])


def narrow_products(code: str) -> Iterator[tuple[str, str]]:
    """Yield the 32-bit products that an address is made of, by name and with their line."""
    constants = {name: int(value) for name, value in _CONSTANT.findall(code)}
    definitions = {name: (kind, rest) for name, kind, rest in _DEFINITION.findall(code)}
    for entries in _LOOP.findall(code):  # what a loop begins with
        for entry in entries.split(", "):
            name, _, first = entry.partition(" = ")
            definitions[name] = ("loop", first)
    pending, reached = _ADDRESS.findall(code), set[str]()
    while pending:
        name = pending.pop()
        kind, rest = definitions.get(name, ("", ""))
        if name in reached or kind not in _CARRIES:
            continue
        reached.add(name)
        operands = _NAME.findall(rest.split(" : ")[0])
        pending.extend(operands)
        small = any(0 <= constants.get(operand, MAX_FACTOR) < MAX_FACTOR for operand in operands)
        if kind == "arith.muli" and "i32" in rest.split(" : ")[1] and not small:
            yield re.sub(r"_\d+$", "", name.removeprefix("%")), rest


def launches() -> dict[str, Launch]:
    """One launch of each kernel."""
    found: dict[str, Launch] = {}
    for op in all_ops():
        for sample in samples_of(op.name) if op.name in SAMPLES else ():
            launch = op.launch(**sample.arguments)
            found.setdefault(launch.kernel.fn.__name__, launch)
    return found


LAUNCHES = {} if INTERPRETED else launches()


@pytest.mark.parametrize("kernel", LAUNCHES)
def test_rows_and_strides_are_multiplied_in_64_bits(kernel: str) -> None:
    code = intermediate_code(LAUNCHES[kernel])
    assert _ADDRESS.search(code), "no address was found"
    listed = SMALL.get(kernel, {})
    found = [(name, rest) for name, rest in narrow_products(code) if name not in listed]
    assert not found


@triton.jit
def _narrow_kernel(
    table_ptr: tl.tensor, stride: tl.tensor, rows_ptr: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.load(rows_ptr + tl.program_id(0))
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(table_ptr + row * stride + column, column)


@triton.jit
def _wide_kernel(
    table_ptr: tl.tensor, stride: tl.tensor, rows_ptr: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(table_ptr + row * stride + column, column)


@triton.jit
def _constant_stride_kernel(table_ptr: tl.tensor, rows_ptr: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.load(rows_ptr + tl.program_id(0))
    tl.store(table_ptr + row * BLOCK, row)


def planted(kernel: object, *scalars: int, block: int) -> Launch:
    table, rows = (zeros(64).int() for _ in range(2))
    arguments: tuple[Tensor | int, ...] = (table, *scalars, rows)
    return Launch(kernel, (1, 1), arguments, {"BLOCK": block})


def test_a_narrow_product_is_seen_and_a_wide_one_passes() -> None:
    narrow = intermediate_code(planted(_narrow_kernel, 5, block=16))
    wide = intermediate_code(planted(_wide_kernel, 5, block=16))
    assert len(list(narrow_products(narrow))) == 1
    assert not list(narrow_products(wide))


def test_a_stride_that_is_a_constant_is_seen() -> None:
    constant = intermediate_code(planted(_constant_stride_kernel, block=151_936))
    block = intermediate_code(planted(_constant_stride_kernel, block=256))
    assert len(list(narrow_products(constant))) == 1
    assert not list(narrow_products(block))
