"""The documents name what exists: files, links, flags, modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import minisgl
from minisgl.server.args import make_parser

ROOT = Path(__file__).parents[1]
PACKAGE = Path(minisgl.__file__).parent
DOCS = [
    ROOT / "README.md",
    ROOT / "benchmark" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
PRESENT = [path for path in DOCS if path.parent.name != "decisions"]  # decisions tell of their time
DOCS_WIDTH = 120
SOURCES = {".py", ".h", ".hpp", ".cpp", ".cu", ".cuh", ".S"}
INDENT = 2
LIGHT_HEADERS = "minisgl/kernel/csrc/hopper/light/"  # at the paths that includes give

docs = pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
docs_of_today = pytest.mark.parametrize("path", PRESENT, ids=lambda path: path.name)


# ---- the tree: a drawing of its folders, and a docstring a package that lists its files


def drawn_folders(drawing: str) -> Iterator[str]:
    """The folders of a drawing: a name a line, deeper ones lie in it, text follows."""
    folders: list[str] = []
    for line in drawing.splitlines():
        depth = (len(line) - len(line.lstrip())) // INDENT
        del folders[depth:]
        folders.append(line.split()[0])
        yield "".join(folders)


def package_of(path: Path) -> Path:
    """The folder whose docstring names the file: the nearest one that is a package."""
    return next(folder for folder in path.parents if (folder / "__init__.py").exists())


def listed_files(package: Path) -> list[str]:
    """The names that begin an indented line of the docstring, with two spaces after them."""
    docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    names = re.findall(r"^ {4}([\w./]+)  +\S", docstring, re.MULTILINE)
    return [name for name in names if Path(name).suffix in SOURCES]


FILES = [path for path in PACKAGE.rglob("*") if path.suffix in SOURCES]
PACKAGES = sorted(path.parent for path in FILES if path.name == "__init__.py")


def test_the_tree_names_every_folder_of_the_package_and_no_other() -> None:
    architecture = (ROOT / "docs" / "architecture.md").read_text()
    section = architecture.partition("\n## The tree\n")[2].partition("\n## ")[0]
    drawing = section.partition("```\n")[2].partition("\n```")[0]
    present = {path.relative_to(PACKAGE.parent).parent.as_posix() + "/" for path in FILES}
    ours = {folder for folder in present if not folder.startswith(LIGHT_HEADERS)}

    assert sorted(drawn_folders(drawing)) == sorted(ours)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_lists_its_files_and_no_other(package: Path) -> None:
    files = [path for path in FILES if package_of(path) == package]
    names = [path.relative_to(package).as_posix() for path in files if path.name != "__init__.py"]

    assert sorted(listed_files(package)) == sorted(names)


# ---- links


@cache
def anchors(path: Path) -> set[str]:
    """What GitHub makes of the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}


@docs
def test_lines_are_short(path: Path) -> None:
    """But for tables, links that do not fit into a line, and drawings."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [line for line in text.splitlines() if len(line) > DOCS_WIDTH]
    assert [line for line in long if not re.match(r"\s*(\||\[\S+$)", line)] == []


@docs
def test_links_lead_to_files_and_headings(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    for link in links:
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


# ---- names in backticks


@cache
def file_names() -> set[str]:
    return {path.name for path in PACKAGE.rglob("*") if path.suffix in SOURCES}


def exists(name: str, doc: Path) -> bool:
    """Files are named from the root of the repository or package, or by the last part alone."""
    roots = (ROOT, PACKAGE, doc.parent)
    return name in file_names() or any((root / name).exists() for root in roots)


@docs_of_today
def test_files_in_backticks_exist(path: Path) -> None:
    names = re.findall(r"`([\w./-]+\.(?:py|cpp|cu|cuh|md|jsonl))`", path.read_text())

    assert [name for name in names if not exists(name, path)] == []


def members(node: ast.ClassDef) -> set[str]:
    """The methods and attributes of a class, those that its methods assign included."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    names = {child.name for child in node.body if isinstance(child, functions)}
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            names.add(child.attr)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            names.add(child.id)
    return names


@cache
def members_of_classes() -> dict[str, set[str]]:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node.name: members(node) for node in nodes}


@docs_of_today
def test_members_of_classes_in_backticks_exist(path: Path) -> None:
    pairs = re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(.*?\))?`", path.read_text())
    classes = members_of_classes()

    assert [pair for pair in pairs if pair[0] not in classes] == []
    assert [(name, member) for name, member in pairs if member not in classes[name]] == []


@cache
def words_of_the_package() -> set[str]:
    sources = (path.read_text() for path in PACKAGE.rglob("*.py"))
    return {word for source in sources for word in re.findall(r"\w+", source)}


@pytest.mark.parametrize(
    "name", ["architecture.md", "devices.md", "extending.md", "reading-order.md"]
)
def test_identifiers_in_backticks_stand_in_the_package(name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    identifiers = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)(?:\(\))?`", text)
    words = words_of_the_package()

    assert [each for each in identifiers if not words.issuperset(each.split("."))] == []


def rows_to_read(text: str) -> Iterator[str]:
    """The cells of a document's tables in the column that says what to read."""
    column = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if "read" in cells:
            column = cells.index("read")
        elif line.startswith("|") and not line.startswith("|---"):
            yield cells[column]


def symbols_of(file: Path) -> dict[str, set[str]]:
    """The names at the top of a module, and the members of those that are classes."""
    symbols: dict[str, set[str]] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef):
            symbols[node.name] = members(node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            symbols[node.name] = set()
    return symbols


def unknown_symbols(cell: str) -> Iterator[str]:
    """What a cell says of its files that they do not have, as in: `file.py`: `Class.one`, `two`.

    A name alone is of the module, or of the class that was named last.
    """
    file = owner = ""
    symbols: dict[str, set[str]] = {}
    for name in re.findall(r"`([\w./]+)`", cell):
        if Path(name).suffix in SOURCES:
            file = name
            owner = ""
            exists = (PACKAGE / file).exists()
            symbols = symbols_of(PACKAGE / file) if exists and file.endswith(".py") else {}
            if not exists:
                yield file
            continue
        head, _, member = name.partition(".")
        if head in symbols:
            owner = head
        else:
            member = name
        if owner not in symbols or (member and member not in symbols[owner]):
            yield f"{file}: {name}"


def test_what_is_to_read_is_in_the_files_of_its_row() -> None:
    cells = list(rows_to_read((ROOT / "docs" / "reading-order.md").read_text()))

    assert len(cells) > 20
    assert [name for cell in cells for name in unknown_symbols(cell)] == []


# ---- docstrings


def docstrings(path: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, documented):
            yield ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.name)
def test_files_and_members_in_docstrings_exist(path: Path) -> None:
    text = "\n".join(docstrings(path))
    names = re.findall(r"[\w/]+\.py\b", text)
    pairs = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    classes = members_of_classes()
    of_package = [(name, member) for name, member in pairs if name in classes]

    assert [name for name in names if not exists(Path(name).name, path)] == []
    assert [pair for pair in of_package if pair[1] not in classes[pair[0]]] == []


# ---- commands


@cache
def flags_of_the_server() -> set[str]:
    return {flag for action in make_parser()._actions for flag in action.option_strings}


@cache
def flags_of_scripts() -> set[str]:
    """The flags that the benchmarks' parsers add."""
    files = [*(ROOT / "benchmark").rglob("*.py"), *(PACKAGE / "benchmark").glob("*.py")]
    flags = [re.findall(r'add_argument\(\s*"(--[\w-]+)"', file.read_text()) for file in files]
    return {flag for each in flags for flag in each}


FLAGS_OF_PIP = "--extra-index-url"
FLAGS_OF_VLLM = """--api-server-count --block-size --enable-expert-parallel --enforce-eager
    --gpu-memory-utilization --load-format --max-model-len --max-num-batched-tokens --max-num-seqs
    --no-async-scheduling --no-enable-prefix-caching --scheduling-policy --tensor-parallel-size"""
FLAGS_OF_SGLANG = """--chunked-prefill-size --context-length --disable-cuda-graph --ep-size
    --disable-overlap-schedule --disable-radix-cache --load-format --mem-fraction-static
    --model-path --schedule-policy --tp-size"""
FLAGS_IN_THE_README = set(f"{FLAGS_OF_PIP} {FLAGS_OF_VLLM} {FLAGS_OF_SGLANG}".split())


@docs_of_today
def test_flags_exist(path: Path) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", path.read_text()))
    of_others = FLAGS_IN_THE_README if path == ROOT / "README.md" else set()

    assert named - flags_of_the_server() - flags_of_scripts() - of_others == set()


@docs_of_today
def test_commands_exist(path: Path) -> None:
    text = path.read_text()
    scripts = re.findall(r"(?<![\w/])((?:scripts|benchmark)/[\w./-]*\w)", text)
    modules = re.findall(r"python -m (minisgl[\w.]*)", text)

    assert [name for name in scripts if not (ROOT / name).exists()] == []
    assert [name for name in modules if find_spec(name) is None] == []


# ---- the systemd unit


def test_the_unit_may_write_where_libraries_keep_kernels() -> None:
    """Triton and FlashInfer write below HOME, and end with an error where they may not."""
    unit = (ROOT / "docs" / "operating" / "minisgl.service").read_text()
    assert "ProtectSystem=strict" in unit
    [folder] = re.findall(r"^CacheDirectory=(.+)$", unit, re.MULTILINE)
    variables = dict(re.findall(r"^Environment=(\w+)=(.+)$", unit, re.MULTILINE))
    assert variables["MINISGL_CACHE"] == variables["HOME"] == f"/var/cache/{folder}"
