"""The house of design.md, proved from the syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashsoft

ROOT = Path(flashsoft.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}

# A layer may import the layers after it, and its own.
LAYERS = (
    ("cli", "integrations"),
    ("modules",),
    ("api", "cache"),
    ("checks", "ops"),
    ("dispatch", "masks", "alibi"),
    ("kernels",),
    ("reference", "tuning", "direct"),
    ("env", "errors", "terms"),
)


def name_of(path: Path) -> str:
    """`kernels/forward.py` is kernels.forward."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[str]:
    """Every module of the package that a file imports, as a dotted name inside the package."""
    package = list(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                inner = ROOT.joinpath(*base, alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                yield ".".join([*base, alias.name] if is_module else base)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flashsoft":
            yield ".".join(node.module.split(".")[1:])
        elif isinstance(node, ast.Import):
            yield from (".".join(a.name.split(".")[1:]) for a in node.names if a.name.split(".")[0] == "flashsoft")


def layer(module: str) -> int | None:
    """None for the package itself, which imports its public names from everywhere."""
    top = module.split(".")[0]
    return next((i for i, names in enumerate(LAYERS) if top in names), None)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_run_one_way(path: Path) -> None:
    own = name_of(path)
    if own in ("", "__main__"):
        return
    level = layer(own)
    assert level is not None, f"{relative(path)} has no layer: give it one here and in design.md"
    for module in imports(path):
        other = layer(module)
        if other is None:
            # `from . import __version__`: for the outermost layer only
            assert module == "" and level == 0, f"{relative(path)} imports {module or 'the package itself'}"
            continue
        same = own.split(".")[0] == module.split(".")[0]
        assert other > level or same, f"{relative(path)} imports {module}, which lies above it"


def test_imports_inside_kernels_have_no_circle() -> None:
    """softmax.py is below all other kernels and imports none."""
    assert not [m for m in imports(ROOT / "kernels" / "softmax.py") if m.startswith("kernels")]
    edges = {name_of(path): set(imports(path)) & {name_of(p) for p in FILES} for path in FILES}

    def reaches(start: str, seen: tuple[str, ...] = ()) -> None:
        assert start not in seen, f"circle: {' -> '.join((*seen, start))}"
        for module in edges.get(start, ()):
            if module:
                reaches(module, (*seen, start))

    for path in (ROOT / "kernels").glob("*.py"):
        if path.name != "__init__.py":
            reaches(name_of(path))


def dotted(node: ast.AST) -> str:
    """`tl.math.exp2` of an attribute chain, or ''."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def calls(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Call):
            yield dotted(node.func), node.lineno


EXPONENTIALS = re.compile(
    r"^(tl|triton\.language|gl|libdevice|math|torch)(\.\w+)*\.(exp|exp2|fast_expf|fast_exp2f|expm1)$"
)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_only_the_primitive_takes_exponentials(path: Path) -> None:
    """A running maximum cannot be rescaled without one; second derivatives (ops/) and tanh hold no maximum."""
    if relative(path) in ("kernels/softmax.py", "reference/softmax.py"):
        assert any(EXPONENTIALS.match(name) for name, _ in calls(path))
    if relative(path).startswith(("kernels/softmax", "kernels/softcap", "reference/")):
        return
    found = [f"line {line}: {name}" for name, line in calls(path) if EXPONENTIALS.match(name)]
    if relative(path).startswith("ops/"):
        inside = {
            call.lineno
            for node in ast.walk(TREES[path])
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_second")
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
        }
        found = [
            f"line {line}: {name}" for name, line in calls(path) if EXPONENTIALS.match(name) and line not in inside
        ]
    if relative(path).startswith(("kernels/interpreter", "cli/")):
        return  # the interpreter's own arithmetic, and figures of a report
    assert not found, f"{relative(path)} takes exponentials of its own: call kernels/softmax.py"


def test_every_softmax_kernel_calls_the_primitive() -> None:
    """And of attention's gradients, whose kernels are a file each, every one."""
    gradients = sorted(path.stem for path in (ROOT / "kernels").glob("backward_*.py"))
    assert {"backward_rows", "backward_queries", "backward_keys"} <= set(gradients)
    for name in ("forward", *gradients, "rows", "logits", "cross_entropy", "cross_entropy_backward", "loss_tiles"):
        path = ROOT / "kernels" / f"{name}.py"
        assert "kernels.softmax" in set(imports(path)), f"{name}.py does not use kernels/softmax.py"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_one_file_registers_and_one_reads_the_environment(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        if relative(path) not in ("ops/registry.py", "integrations/torch_sdpa.py"):  # the latter: torch's own operators
            assert not name.startswith("torch.library"), f"{relative(path)}:{node.lineno} registers"
        if relative(path) != "ops/registry.py":
            assert name != "torch.autograd.Function", f"{relative(path)}:{node.lineno} differentiates"
        if relative(path) != "env.py":
            assert name not in ("os.environ", "os.getenv", "os.putenv"), f"{relative(path)}:{node.lineno}"
            if isinstance(node, ast.ImportFrom):
                assert not (node.module == "os" and {a.name for a in node.names} & {"environ", "getenv"})


def decorators(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.FunctionDef):
            yield from ((dotted(d.func if isinstance(d, ast.Call) else d), node.lineno) for d in node.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_kernels_live_in_kernels_and_none_tunes_itself(path: Path) -> None:
    for name, line in decorators(path):
        assert not name.endswith("autotune"), f"{relative(path)}:{line}: configs are data, see tuning/"
        if name in ("triton.jit", "jit", "gluon.jit"):
            assert relative(path).startswith("kernels/"), f"{relative(path)}:{line}: a kernel outside kernels/"
    if not relative(path).startswith(("kernels/", "tuning/")):
        direct = [
            node.lineno
            for node in ast.walk(TREES[path])
            if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "triton" for a in node.names))
            or (isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "triton")
        ]
        top_level = [node.lineno for node in TREES[path].body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not set(direct) & set(top_level), f"{relative(path)} imports triton when it is imported"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_names_say_what_is_inside(path: Path) -> None:
    assert path.stem not in ("utils", "util", "helpers", "common", "misc", "tools")
    assert not re.search(r"_v\d+$|_new$|_old$|_final$", path.stem)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_files_are_short_and_say_what_they_are(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(TREES[path]), f"{relative(path)} has no docstring"
    assert len(text.splitlines()) <= 450, f"{relative(path)}: a place to look for a second idea"


def test_everything_public_has_a_docstring_with_an_example() -> None:
    for name in flashsoft.__all__:
        public = getattr(flashsoft, name)
        assert public.__doc__, f"{name} has no docstring"
    without = ("BackendUnavailableError", "Window")  # Window's is with Causal
    for name in set(flashsoft.__all__) - set(without):
        assert ">>>" in getattr(flashsoft, name).__doc__, f"{name} has no example"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_public_functions_have_docstrings(path: Path) -> None:
    for node in TREES[path].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            overload = any(dotted(d) == "overload" for d in node.decorator_list)
            assert overload or ast.get_docstring(node), f"{relative(path)}:{node.lineno} {node.name}"


def test_every_backend_has_the_same_functions() -> None:
    """`kernels` and `reference` are twins by name and arguments."""

    def functions(*paths: Path) -> dict[str, list[str]]:
        return {
            node.name: [a.arg for a in node.args.args]
            for path in paths
            for node in TREES[path].body
            if isinstance(node, ast.FunctionDef) and re.search(r"_(forward|backward)$", node.name)
        }

    kernels = functions(*(ROOT / "kernels").glob("*.py"))
    reference = functions(*(ROOT / "reference").glob("*.py"))
    assert reference
    for name, arguments in reference.items():
        assert [a.lstrip("_") for a in kernels.get(name, [])] == arguments, name
