"""README and docs as their tests read them: pages, code blocks, commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from scripts.build_pages import slug
from tests.project.tree import ROOT

PAGES = {
    str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
}


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def lines(text: str) -> list[str]:
    """The commands in the ``sh`` blocks, one per line, without comments."""
    found = [re.sub(r"\s+#\s.*$", "", line).strip() for block in blocks(text, "sh") for line in block.splitlines()]
    return [line for line in found if line and not line.startswith("#")]


def printed(text: str) -> list[tuple[str, str]]:
    """Each command that has an ``sh`` block of its own, with the ``text`` block right after it, which it prints."""
    return re.findall(r"^```sh\n([^\n]+)\n```\n\n```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def parts(line: str) -> list[list[str]]:
    """Words of each command in ``a && b``. ``gpipe-bench`` stands for ``python -m gpipe_bench``, too."""
    found = [shlex.split(part) for part in line.split(" && ")]
    return [["gpipe-bench", *words[3:]] if words[:3] == ["python", "-m", "gpipe_bench"] else words for words in found]


def commands(text: str) -> list[list[str]]:
    """Words of each command of a page, in order."""
    return [words for line in lines(text) for words in parts(line)]


def anchors(path: Path) -> set[str]:
    """The anchors of a page."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
