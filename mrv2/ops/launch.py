"""A kernel launch as a value: which kernel, which grid, which arguments.

A value can be run on a device, or compiled for one that is not there. The second is how a machine
without a GPU proves that every kernel builds. `signature` leans on Triton's undocumented
`triton.runtime.jit.mangle_type`; it stays in this file, where an upgrade that moves it is mended.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type


def cdiv(dividend: int, divisor: int) -> int:
    """Return the quotient rounded up, of numbers from 0 on.

    `triton.cdiv` is a kernel's function, and costs a launcher over twenty times as much.
    """
    return -(-dividend // divisor)


@dataclass(slots=True)
class Launch:
    """One launch of a Triton kernel.

    Not frozen: it is built on the path of every step, and frozen costs twice as much.
    """

    kernel: Any
    """The `triton.jit` function."""
    grid: tuple[int, ...]
    """Programs along each axis. An axis of 0 launches nothing."""
    args: tuple[Any, ...]
    """Run-time arguments in the kernel's order, before its constexprs."""
    constexprs: Mapping[str, Any]
    """Compile-time arguments by name."""
    num_warps: int = 4
    contracts: bool = True
    """Whether a product and a sum may be rounded as one. False where the reference rounds both."""
    max_registers: int | None = None
    """Registers that a thread may have, where fewer let more programs run side by side."""

    def run(self) -> None:
        """Start the kernel; an empty grid starts nothing."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            *self.args,
            **self.constexprs,
            num_warps=self.num_warps,
            enable_fp_fusion=self.contracts,
            maxnreg=self.max_registers,
        )

    def signature(self) -> dict[str, str]:
        """Return the type of each of the kernel's arguments in its order, as Triton spells it.

        Raises:
            TypeError: The launch does not give as many arguments as the kernel takes.
        """
        names = list(self.kernel.arg_names)
        runtime = [name for name in names if name not in self.constexprs]
        if len(runtime) != len(self.args):
            raise TypeError(
                f"{self.kernel.fn.__name__} takes {runtime}, "
                f"the launch gives {len(self.args)} arguments"
            )
        types = {n: mangle_type(value) for n, value in zip(runtime, self.args, strict=True)}
        return {name: types.get(name, "constexpr") for name in names}

    def compile_offline(self, arch: int = 90) -> bytes:
        """Compile for an NVIDIA device that need not be present.

        Args:
            arch: Compute capability times ten.

        Returns:
            The cubin.

        Raises:
            triton.CompilationError: The kernel does not build.
        """
        names = list(self.kernel.arg_names)
        source = ASTSource(
            self.kernel,
            signature=self.signature(),
            constexprs={(names.index(name),): value for name, value in self.constexprs.items()},
        )
        options = {
            "num_warps": self.num_warps,
            "enable_fp_fusion": self.contracts,
            "maxnreg": self.max_registers,
        }
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        return bytes(compiled.asm["cubin"])
