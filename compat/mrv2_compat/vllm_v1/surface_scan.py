"""Every name that vLLM touches on a model runner, read from its source by syntax tree.

vLLM declares no interface between a worker and its runner: it is whatever the worker, the warm-ups
and the connectors touch. This module reads vLLM's files without importing them and lists each
attribute that is read, written, called, or named in `getattr`, `hasattr` and `setattr`, with its
place. An expression is taken for a runner when it is an attribute of a runner's usual name, a
parameter of that name or with a runner class as annotation, or a variable or `self` attribute that
was bound to one (through `cast`, `getattr` with a literal name, a conditional or a walrus).
`isinstance` checks and objects kept in containers are not followed, so the list is a lower bound;
what it misses shows as an AttributeError that names the attribute.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mrv2_compat.vllm_v1.surface import DYNAMIC

RUNNER_NAMES = frozenset({"model_runner", "gpu_model_runner", "_model_runner", "model_runner_v2"})
"""Attributes that hold a runner, whatever object they are of."""

RUNNER_PARAMETERS = RUNNER_NAMES | {"runner", "input_runner", "mr"}
"""Parameters that hold a runner in a file that speaks of model runners."""

_RUNNER_CLASS = re.compile(r"\w*ModelRunner\b")
_SPEAKS_OF_RUNNERS = re.compile(r"ModelRunner\b|model_runner\b")
_DYNAMIC = frozenset({"getattr", "hasattr", "setattr", "delattr"})

EXCLUDED: dict[str, str] = {
    "v1/worker/gpu/": "vLLM's V2 runner and its parts",
    "v1/worker/gpu_model_runner.py": "vLLM's V1 runner",
    "v1/worker/cpu_model_runner.py": "vLLM's V1 runner on CPU",
    "v1/worker/cpu/model_runner.py": "vLLM's V2 runner on CPU",
    "v1/worker/xpu_model_runner.py": "vLLM's runner on XPU",
    "v1/worker/xpu_worker.py": "the worker of a platform that is not served",
    "v1/worker/mm_encoder_model_runner.py": "vLLM's runner for encoders",
    "v1/worker/lora_model_runner_mixin.py": "a part of vLLM's runners",
    "v1/worker/kv_connector_model_runner_mixin.py": "a part of vLLM's runners",
    "v1/worker/ec_connector_model_runner_mixin.py": "a part of vLLM's runners",
    "v1/spec_decode/": "built by vLLM's runners, which hand themselves over",
}
"""Files, and folders with a slash at their end, that are a runner themselves."""


@dataclass(frozen=True, slots=True, order=True)
class Access:
    """One place where vLLM touches a runner."""

    path: str
    """The file, relative to vLLM's package folder."""

    line: int
    kind: str
    """`load`, `store`, `call`, `getattr`, `hasattr`, `setattr` or `delattr`."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.kind})"


def scan_vllm(root: Path) -> dict[str, tuple[Access, ...]]:
    """Return every name that vLLM touches on a runner, with the places, both sorted.

    Args:
        root: The package folder, the one that holds `v1` and `config`.
    """
    found: dict[str, set[Access]] = {}
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if relative.startswith(tuple(EXCLUDED)):
            continue
        for name, access in scan_source(path.read_text(encoding="utf-8"), relative):
            found.setdefault(name, set()).add(access)
    return {name: tuple(sorted(found[name])) for name in sorted(found)}


def scan_source(source: str, path: str) -> Iterator[tuple[str, Access]]:
    """Yield each name that one file touches on a runner.

    A name that `getattr` and its like compute while running is given as `surface.DYNAMIC`.
    """
    if _SPEAKS_OF_RUNNERS.search(source):
        yield from _scan_block(ast.parse(source), _Scope(), path)


@dataclass(slots=True)
class _Scope:
    """What is known to hold a runner inside one function, class or module."""

    variables: set[str] = field(default_factory=set)
    self_attributes: set[str] = field(default_factory=set)

    def holds_runner(self, node: ast.expr) -> bool:
        """Return whether an expression is a runner, as far as the syntax tells."""
        match node:
            case ast.Name(id=name):
                return name in self.variables
            case ast.Attribute(attr=name) if name in RUNNER_NAMES:
                return True
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return name in self.self_attributes
            case ast.Call(func=ast.Name(id="cast") | ast.Attribute(attr="cast"), args=[_, inner]):
                return self.holds_runner(inner)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=name), *_]):
                return name in RUNNER_NAMES
            case ast.NamedExpr(value=value):
                return self.holds_runner(value)
            case ast.IfExp(body=body, orelse=orelse):
                return self.holds_runner(body) or self.holds_runner(orelse)
            case _:
                return False

    def bind(self, target: ast.expr) -> None:
        """Note that a target was assigned a runner."""
        match target:
            case ast.Name(id=name):
                self.variables.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self.self_attributes.add(name)


def _scan_block(
    block: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
    outer: _Scope,
    path: str,
) -> Iterator[tuple[str, Access]]:
    scope = _Scope(set(outer.variables), set(outer.self_attributes))
    if isinstance(block, ast.ClassDef):
        scope.self_attributes = _bound_self_attributes(block)
    elif not isinstance(block, ast.Module):
        scope.variables |= _runner_parameters(block.args)
    own = list(_own_nodes(block))
    _bind_until_stable(own, scope)
    called = {id(node.func) for node in own if isinstance(node, ast.Call)}
    for node in own:
        yield from _accesses(node, scope, path, called)
    for node in own:
        if isinstance(node, _BLOCKS):
            yield from _scan_block(node, scope, path)


_BLOCKS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _own_nodes(block: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a block without those of blocks inside it, which come as one node each."""
    waiting = list(ast.iter_child_nodes(block))
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, _BLOCKS):
            waiting.extend(ast.iter_child_nodes(node))


def _runner_parameters(arguments: ast.arguments) -> set[str]:
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {argument.arg for argument in every if _is_runner_parameter(argument)}


def _is_runner_parameter(argument: ast.arg) -> bool:
    if argument.annotation is None:
        return argument.arg in RUNNER_PARAMETERS
    annotation = ast.unparse(argument.annotation)
    if _RUNNER_CLASS.search(annotation):
        return True
    return argument.arg in RUNNER_PARAMETERS and annotation in ("Any", "object")


def _bound_self_attributes(block: ast.ClassDef) -> set[str]:
    """Return the attributes of `self` that any method of a class binds to a runner."""
    bound: set[str] = set()
    for method in block.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            scope = _Scope(_runner_parameters(method.args))
            _bind_until_stable(list(ast.walk(method)), scope)
            bound |= scope.self_attributes
    return bound


def _bind_until_stable(nodes: list[ast.AST], scope: _Scope) -> None:
    """Follow assignments until no further variable turns out to hold a runner."""
    known = -1
    while known != len(scope.variables) + len(scope.self_attributes):
        known = len(scope.variables) + len(scope.self_attributes)
        for node in nodes:
            match node:
                case ast.Assign(targets=targets, value=value) if scope.holds_runner(value):
                    for target in targets:
                        scope.bind(target)
                case ast.AnnAssign(target=target, value=ast.expr() as given):
                    if scope.holds_runner(given):
                        scope.bind(target)
                case ast.NamedExpr(target=target, value=value) if scope.holds_runner(value):
                    scope.bind(target)


def _accesses(
    node: ast.AST, scope: _Scope, path: str, called: set[int]
) -> Iterator[tuple[str, Access]]:
    match node:
        case ast.Attribute(value=owner, attr=name, ctx=context) if scope.holds_runner(owner):
            load = "call" if id(node) in called else "load"
            kind = load if isinstance(context, ast.Load) else "store"
            yield name, Access(path, node.lineno, kind)
        case ast.Call(func=ast.Name(id=function), args=[owner, name_node, *_]):
            if function in _DYNAMIC and scope.holds_runner(owner):
                literal = name_node.value if isinstance(name_node, ast.Constant) else DYNAMIC
                yield str(literal), Access(path, node.lineno, function)
