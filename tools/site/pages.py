"""Pages of the site that are made of what the repository says already; links that lead out of it.

A hook of MkDocs (mkdocs.yml). `on_*` are its names for when each runs.
"""

from __future__ import annotations

import ast
import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# In the order they are read.
NOTEBOOKS = {
    "launch_a_cubin": "A cubin launched",
    "triton_without_triton": "Triton without Triton",
    "patch_a_model": "A model patched",
}
# Page -> what of the repository it is.
COPIES = {
    **{f"notebooks/{name}.md": f"docs/notebooks/{name}.ipynb" for name in NOTEBOOKS},
    "index.md": "README.md",
    "zh.md": "README.zh-CN.md",
    "results.md": "benchmarks/RESULTS.md",
    "changelog.md": "CHANGELOG.md",
}
# What the tests of documents say behind a block's language, for which a block is none to the site.
_NEEDS = re.compile(r"^( *```[a-z]+) .*$", re.MULTILINE)
_ITEM = re.compile(r"- |\d+\. |\|")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")

# Page of the reference -> title, what it is about, and the names it shows.
RUNTIME = {
    "kernel": ("Kernels and launches", ["Kernel", "KernelFunction", "BoundLaunch"]),
    "registry": ("The registry", ["registry"]),
    "arrays": ("Memory without torch, tensor maps", ["DeviceArray", "TensorMap"]),
    "memory": (
        "The memory pool, page-locked memory",
        [
            "memory_stats",
            "set_release_threshold",
            "reset_peak_memory_stats",
            "trim",
            "empty_pinned",
        ],
    ),
    "errors": ("Errors", ["errors"]),
}


def exported() -> dict[str, str]:
    """Names that `kernel_hub` exports -> where they are written."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse((ROOT / "kernel_hub/__init__.py").read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            module = ".".join(filter(None, ("kernel_hub", node.module)))
            found |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names}
    return found


def ops() -> dict[str, str]:
    """Ops -> where they are written."""
    tree = ast.parse((ROOT / "kernel_hub/ops/__init__.py").read_text("utf-8"))
    return {
        alias.name: f"kernel_hub.ops.{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.level == 1
        for alias in node.names
    }


def reference() -> dict[str, str]:
    """Path -> text of the pages that show docstrings."""
    whole = "    options:\n      heading_level: 1\n"
    pages = {f"reference/ops/{op}.md": f"::: {path}\n{whole}" for op, path in ops().items()}
    where = exported()
    for page, (title, names) in RUNTIME.items():
        shown = [where.get(name, f"kernel_hub.{name}") for name in names]
        blocks = "\n".join(f"::: {path}\n" for path in shown)
        pages[f"reference/{page}.md"] = f"# {title}\n\n{blocks}"
    return pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The order of the pages; guides that are there."""
    guides = [
        "launching", "formats", "doors", "models", "engine", "serving", "batch_invariance",
        "memory", "troubleshooting",
    ]  # fmt: skip
    trust = ["cubin_trust", "security"]
    inside = ["architecture", "reading_the_kernels", "adding_a_kernel"]

    def there(names: list[str]) -> list[str]:
        return [f"{name}.md" for name in names if (ROOT / "docs" / f"{name}.md").is_file()]

    notes = sorted(f"notes/{path.name}" for path in (ROOT / "docs/notes").glob("*.md"))
    config.nav = [
        {"Start": [{"README": "index.md"}, {"中文": "zh.md"}]},
        {"Guides": there(guides)},
        {"Notebooks": [{title: f"notebooks/{name}.md"} for name, title in NOTEBOOKS.items()]},
        {"Ops": [{op: f"reference/ops/{op}.md"} for op in sorted(ops())]},
        {"Runtime": [{title: f"reference/{page}.md"} for page, (title, _) in RUNTIME.items()]},
        {"Results": "results.md"},
        {"Trust": there(trust)},
        {"Inside": [*there(inside), {"Notes of what was measured": notes}]},
        {"Changes": "changelog.md"},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that no file of docs/ is, and pictures that pages show."""
    for page, source in COPIES.items():
        if (ROOT / source).is_file():
            text = linked(_read(ROOT / source), source, page)
            files.append(File.generated(config, page, content=text))
    for page, text in reference().items():
        files.append(File.generated(config, page, content=text))
    for picture in sorted((ROOT / "benchmarks/results").glob("*.svg")):
        files.append(
            File.generated(config, f"pictures/{picture.name}", content=picture.read_bytes())
        )
    return files


def _read(source: Path) -> str:
    if source.suffix == ".ipynb":
        made = runpy.run_path(str(Path(__file__).with_name("notebooks.py")))
        return str(made["as_markdown"](source))
    return source.read_text("utf-8")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links of a page of docs/ as the site has them."""
    path = page.file.src_uri
    if path in COPIES or path.startswith("reference/"):
        return markdown
    return linked(markdown, f"docs/{path}", path)


def linked(markdown: str, source: str, page: str) -> str:
    """`markdown` of `source`, as `page`: a link to what the site lacks becomes its name."""

    def place(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        to = {origin: copy for copy, origin in COPIES.items()}.get(path)
        if to is None and path.startswith("docs/") and (ROOT / path).is_file():
            to = path.removeprefix("docs/")
        elif path.startswith("benchmarks/results/") and path.endswith(".svg"):
            to = f"pictures/{posixpath.basename(path)}"
        if to is None:
            return text if text.startswith("`") else f"`{path}`" if text == path else text
        link = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{mark}[{text}]({link}{'#' if anchor else ''}{anchor})"

    return _LINK.sub(place, _apart(_NEEDS.sub(r"\1", markdown)))


def _apart(markdown: str) -> str:
    """Lists and tables that follow a paragraph at once, which GitHub takes, after a blank line."""
    lines, is_code = [""], False
    for line in markdown.split("\n"):
        begins = _ITEM.match(line) and not _ITEM.match(lines[-1])
        if begins and not is_code and lines[-1].strip() and not lines[-1].startswith((" ", "#")):
            lines.append("")
        is_code ^= line.lstrip().startswith("```")
        lines.append(line)
    return "\n".join(lines[1:])
