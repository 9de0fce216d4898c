"""The shape of the package: who imports whom, what `import convgrad` loads, examples that run, short files."""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import convgrad
from convgrad.plan import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(convgrad.__file__).parent
MODULES = {".".join(("convgrad", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
           for path in sorted(PACKAGE.rglob("*.py"))}
LONGEST_FILE = {".py": 450, ".cpp": 500, ".h": 500}
LAZY = {"torch", "jax", "triton", "rich", "cupy", "en_dtypes"}  # never at the top of what `import convgrad` loads


def imports_of(module: str) -> set[str]:
    """Absolute names of all modules that a module imports, anywhere in it; type-checking imports count too."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[:len(package.split(".")) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module.split(".") if node.module else [])])
            found.add(name)
            found |= {f"{name}.{alias.name}" for alias in node.names if f"{name}.{alias.name}" in MODULES}
    return found


def family(module: str, group: str) -> str | None:
    """The backend or front end that a module belongs to: frontends/torch/tensors.py is of the torch family."""
    if not module.startswith(f"convgrad.{group}."):
        return None
    return module.split(".")[2].partition("_")[0]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    """api, front ends -> plan -> backends -> problem, numbers, scaled, checks; front ends and backends are apart."""
    ours = {name for name in imports_of(module) if name.startswith("convgrad")}
    if module == "convgrad.problem":
        assert not ours
    elif module in ("convgrad.numbers", "convgrad.scaled", "convgrad.checks"):
        assert ours <= {"convgrad.problem", "convgrad.checks"}
    elif module == "convgrad.plan":
        # backends are named in a table and imported when asked for
        assert ours <= {"convgrad.problem", "convgrad.checks"}
    elif family(module, "backends"):
        below = ("", "._native", ".backends", ".problem", ".numbers", ".scaled", ".checks")
        for name in ours - {f"convgrad{part}" for part in below}:
            assert family(name, "backends") == family(module, "backends"), f"{module} imports {name}"
    elif family(module, "frontends"):
        for name in ours:
            assert not name.startswith("convgrad.backends"), f"{module} imports {name}"
            # NumPy is the ground that all arrays stand on; otherwise a front end sees itself only.
            assert family(name, "frontends") in (None, family(module, "frontends"), "numpy", "blocked"), \
                f"{module} imports {name}"
    else:
        assert not any(name.startswith("convgrad.backends.") for name in ours), f"{module} imports a backend"


def test_problem_needs_the_standard_library_only() -> None:
    assert {name.partition(".")[0] for name in imports_of("convgrad.problem")} <= sys.stdlib_module_names


@pytest.mark.parametrize("package", ["torch", "jax", "triton", "cupy"])
def test_frameworks_are_imported_only_where_they_belong(package: str) -> None:
    """Their own front end, a GPU backend, comparisons in the benchmark; DLPack launches on CUDA through torch."""
    for module in MODULES:
        if any(name.partition(".")[0] == package for name in imports_of(module)):
            assert module.startswith(("convgrad.frontends.torch", "convgrad.frontends.dlpack", "convgrad.frontends.jax",
                                      "convgrad.backends.triton", "convgrad.benchmark")), f"{module} imports {package}"


def test_import_is_fast_and_light() -> None:
    """Few modules beside numpy's, about a millisecond each: a number that no busy machine changes."""
    script = ("import json, sys, numpy; before = set(sys.modules); import convgrad; "
              "print(json.dumps([list(sys.modules), list(set(sys.modules) - before)]))")
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded, ours = json.loads(answer.stdout)
    assert not LAZY & {name.partition(".")[0] for name in loaded}
    assert len(ours) < 60, f"import convgrad loads {sorted(ours)}"


DOCUMENTED = ["convgrad.api", "convgrad.plan", "convgrad.explain", "convgrad.problem", "convgrad.numbers",
              "convgrad.tile.boxes", "convgrad.tile.gradients"]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_doctests(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


@pytest.mark.parametrize("name", convgrad.__all__)
def test_public_names_are_documented(name: str) -> None:
    public = getattr(convgrad, name)
    assert public.__doc__
    if not isinstance(public, type):
        assert ">>> " in public.__doc__
        assert "Parameters\n" in public.__doc__ or "arameters are those of" in public.__doc__


def test_files_stay_short() -> None:
    sources = [path for folder in ("src", "tests", "docs", "examples", "native") for path in (ROOT / folder).rglob("*")
               if path.suffix in LONGEST_FILE]
    assert len(sources) > 20
    long = {str(path.relative_to(ROOT)): lines for path in sources
            if (lines := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_FILE[path.suffix]}
    assert not long


def test_every_module_says_what_it_is() -> None:
    for module, path in MODULES.items():
        text = path.read_text(encoding="utf-8")
        assert not text.strip() or ast.get_docstring(ast.parse(text)), f"{module} has no docstring"


def test_installed_files_are_complete() -> None:
    """What tests import has the type marker and the data files, and knows its version."""
    assert (PACKAGE / "py.typed").exists() and (PACKAGE / "data" / "geometries.txt").exists()
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^version = "(.*)"$', project, re.MULTILINE)[1] == convgrad.__version__  # type: ignore[index]


def test_lazy_front_ends_exist_or_say_so() -> None:
    for name in ("torch", "jax", "onednn", "cann", "ascendc"):
        if importlib.util.find_spec(f"convgrad.frontends.{name}") is None:
            with pytest.raises((ImportError, AttributeError)):
                getattr(convgrad, name)
    with pytest.raises(AttributeError, match="module 'convgrad' has no attribute 'nothing'"):
        _ = convgrad.nothing


def test_backends_are_modules_with_a_plan() -> None:
    for name, module in BACKENDS.items():
        if importlib.util.find_spec(module) is not None:
            path = MODULES[module]
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert any(isinstance(node, ast.FunctionDef) and node.name == "plan" for node in tree.body), name


def test_no_vague_module_names() -> None:
    vague = {"utils", "helpers", "common", "manager", "base", "impl", "misc"}
    assert not [name for name in MODULES if set(name.split(".")) & vague]
    assert not [name for _, name, _ in pkgutil.iter_modules([str(PACKAGE)]) if name in vague]


# --- documents --------------------------------------------------------------------------------------------------------

def support_matrix() -> object:
    spec = importlib.util.spec_from_file_location("support_matrix", ROOT / "docs" / "support_matrix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_support_matrix_of_the_readme_is_current() -> None:
    """Columns of backends that cannot load here are taken as they are; run docs/support_matrix.py to renew it."""
    made = support_matrix()
    cells, readme = made.columns(), made.written()  # type: ignore[attr-defined]
    rows = [[cell.strip() for cell in line.split("|")[2:-1]] for line in readme.splitlines() if line.startswith("| ")]
    assert [head.split()[0] for head in rows[0]] == list(cells), "the backends of README.md"
    for place, name in enumerate(cells):
        cells[name] = cells[name] or [row[place] for row in rows[1:]]
    assert readme == made.matrix(cells)  # type: ignore[attr-defined]


def test_the_readme_example_runs() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    lines = [line for line in code[1].splitlines() if line]
    assert len(lines) <= 6
    small = code[1].replace("8, 64, 56, 56", "2, 8, 7, 7").replace("128, 64, 3, 3", "4, 8, 3, 3")
    subprocess.run([sys.executable, "-c", small], check=True, env=backend_environment())


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path: Path, tmp_path: Path) -> None:
    answer = subprocess.run([sys.executable, str(path)], cwd=tmp_path, capture_output=True, text=True,
                            env=backend_environment())
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip()


def backend_environment() -> dict[str, str]:
    """The package that is tested here, from any folder; where no backend is built the reference serves."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")])}
    try:
        convgrad.plan("input_grad f32 n1 c1 k1 i3 w1")
        return found
    except convgrad.Unsupported:
        return {**found, "CONVGRAD_BACKEND": "reference"}


def test_documents_name_no_machine() -> None:
    """Paths of somebody's machine, and words about how the project is made, have no place in it."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".py", ".md", ".txt", ".toml", ".cpp", ".h", "") and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not re.search(r"/(work|home|root)/[a-z]", text), f"{name} has a path of one machine"
