"""The stand-in for Gaudi's software beside the published source: names and arguments.

Both are read, neither is imported: the source needs a card's libraries.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "habana_frameworks"
Function = ast.FunctionDef | ast.AsyncFunctionDef

OWN = frozenset(
    {
        # Torch asks these of the key that the simulated cards have; Gaudi's is another.
        "habana_frameworks.torch.hpu:_is_in_bad_fork",
        "habana_frameworks.torch.hpu:get_amp_supported_dtype",
        # Made by the original's C++.
        "habana_frameworks.torch.utils.experimental:synDeviceType.synDeviceGaudi",
        "habana_frameworks.torch.utils.experimental:synDeviceType.synDeviceGaudi2",
        "habana_frameworks.torch.utils.experimental:synDeviceType.synDeviceGaudi3",
        "habana_frameworks.torch.utils._debug_eager_C:join_pending_pipeline_threads",
        "habana_frameworks.torch.dynamo.compile_backend._recipe_compiler_C:reset_seeds",
        # The original keeps these classes in a module that the stand-in does not need.
        "habana_frameworks.torch.hpu.metrics:GraphCompilationMetric",
        "habana_frameworks.torch.hpu.metrics:CpuFallbackMetric",
        "habana_frameworks.torch.hpu.metrics:RecipeCacheMetric",
    }
)
"""Names of the stand-in that the source does not have at this place, each with its reason above."""


@dataclass
class Module:
    """What a module's text binds, at any depth outside functions.

    Attributes:
        functions: of the module and of functions in it, by name; those of classes by Class.name.
        names: classes, assignments, and imports of the same package as a whole.
        others: what is imported from elsewhere.
        stars: modules whose names are taken over.
        origins: name -> (module, name there), for what is imported from the same package.
    """

    functions: dict[str, Function] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)
    stars: list[str] = field(default_factory=list)
    origins: dict[str, tuple[str, str]] = field(default_factory=dict)


class Tree:
    """A folder that holds ``habana_frameworks``, read as text."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read: dict[str, Module | None] = {}

    def modules(self) -> list[str]:
        """Dotted names of all modules."""
        found = []
        for path in sorted((self._root / PACKAGE).rglob("*.py")):
            parts = path.relative_to(self._root).with_suffix("").parts
            found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
        return found

    def module(self, name: str) -> Module | None:
        """One module, or None where there is no such file."""
        if name not in self._read:
            path = self._root.joinpath(*name.split("."))
            file = next(
                (f for f in (path.with_suffix(".py"), path / "__init__.py") if f.is_file()), None
            )
            self._read[name] = (
                None
                if file is None
                else _module(ast.parse(file.read_text(encoding="utf-8")), name, file)
            )
        return self._read[name]

    def function(self, module: str, name: str) -> Function | None:
        """A function's definition, followed through imports."""
        read = self.module(module)
        if read is None:
            return None
        if name in read.functions:
            return read.functions[name]
        owner, _, rest = name.partition(".")
        if owner in read.origins:
            there, original = read.origins[owner]
            return self.function(there, f"{original}.{rest}" if rest else original)
        for star in read.stars:
            found = self.function(star, name)
            if found is not None:
                return found
        # Functions within one that is imported: wrappers that are put into torch.
        for there, _ in read.origins.values():
            imported = self.module(there)
            if imported is not None and name in imported.functions:
                return imported.functions[name]
        return None

    def binds(self, module: str, name: str) -> bool:
        """Whether the module has that name after its import."""
        read = self.module(module)
        if read is None:
            return False
        if name in read.names | read.others or name in read.functions or name in read.origins:
            return True
        if self.module(f"{module}.{name}") is not None:
            return True
        return any(self.binds(star, name) for star in read.stars)


def differences(standin: Path, source: Path) -> list[str]:
    """Where the stand-in has a name that the source lacks, or other arguments for it.

    Args:
        standin, source: folders that hold ``habana_frameworks``.
    """
    ours, theirs = Tree(standin), Tree(source)
    found = []
    for module in ours.modules():
        if theirs.module(module) is None:
            # Namespace packages have no file of their own.
            if not source.joinpath(*module.split(".")).is_dir():
                found.append(f"{module}: there is no such module")
            continue
        read = ours.module(module)
        assert read is not None
        for name, function in sorted(read.functions.items()):
            original = theirs.function(module, name)
            if original is None:
                if not _is_own(module, name):
                    found.append(f"{module}.{name}: there is no such function")
            elif f"{module}:{name}" in OWN:
                found.append(f"{module}.{name}: listed as the stand-in's own, but there is one")
            elif arguments(function) != arguments(original):
                found.append(
                    f"{module}.{name}: ({', '.join(arguments(function))}), "
                    f"there ({', '.join(arguments(original))})"
                )
        for name in sorted(read.names | set(read.origins)):
            if not _is_own(module, name) and not theirs.binds(module, name):
                found.append(f"{module}.{name}: there is no such name")
    return found


def _is_own(module: str, name: str) -> bool:
    """Whether a name is the stand-in's alone; its helpers begin with an underscore."""
    owner, _, last = name.rpartition(".")
    helper = any(part.startswith("_") and not part.endswith("__") for part in (owner, last))
    return helper or name == "__all__" or f"{module}:{name}" in OWN


def arguments(function: Function) -> list[str]:
    """Names, kinds and defaults; annotations are not compared."""
    given = function.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + list(given.defaults)
    shown = [_shown(a, d) for a, d in zip(positional, defaults, strict=True)]
    if given.posonlyargs:
        shown.insert(len(given.posonlyargs), "/")
    if given.vararg:
        shown.append(f"*{given.vararg.arg}")
    elif given.kwonlyargs:
        shown.append("*")
    shown += [_shown(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        shown.append(f"**{given.kwarg.arg}")
    return shown


def _shown(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"


def _module(tree: ast.Module, name: str, file: Path) -> Module:
    module = Module()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    _bind(tree.body, module, package, "")
    return module


def _bind(body: list[ast.stmt], module: Module, package: str, owner: str) -> None:
    for node in body:
        if isinstance(node, Function):
            module.functions[owner + node.name] = node
            if not owner:
                _bind_functions_within(node, module)
        elif isinstance(node, ast.ClassDef):
            module.names.add(owner + node.name)
            _bind(node.body, module, package, f"{owner}{node.name}.")
        elif isinstance(node, ast.ImportFrom):
            _bind_import(node, module, package)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module.others.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    module.names.add(owner + target.id)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
            for part in ("body", "orelse", "finalbody"):
                _bind(getattr(node, part, []), module, package, owner)
            for handler in getattr(node, "handlers", []):
                _bind(handler.body, module, package, owner)


def _bind_functions_within(function: Function, module: Module) -> None:
    for node in ast.walk(function):
        if isinstance(node, Function) and node is not function:
            module.functions.setdefault(node.name, node)


def _bind_import(node: ast.ImportFrom, module: Module, package: str) -> None:
    base = node.module or ""
    if node.level:
        parts = package.split(".")
        parent = ".".join(parts[: len(parts) - node.level + 1])
        base = f"{parent}.{base}" if base else parent
    for alias in node.names:
        if alias.name == "*":
            module.stars.append(base)
        elif base.startswith(PACKAGE):
            module.origins[alias.asname or alias.name] = (base, alias.name)
        else:
            module.others.add(alias.asname or alias.name)
