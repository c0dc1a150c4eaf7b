"""Links in documents lead somewhere, and every document can be reached from the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)
HEADING = re.compile(r"^#+ (.+)$", re.M)
ANCHOR = re.compile(r'<a id="([^"]+)">')


def links(document):
    """Return targets of relative links, without those in code."""
    found = LINK.findall(FENCE.sub("", document.read_text()))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(document):
    """Return the anchors of a document as GitHub makes them."""
    text = FENCE.sub("", document.read_text())
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}
    return made | set(ANCHOR.findall(text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    broken = []
    for target in links(document):
        name, _, anchor = target.partition("#")
        other = (document.parent / name).resolve() if name else document
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    assert not broken


def test_every_document_can_be_reached_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        document = left.pop()
        if document in reached or document.suffix != ".md":
            continue
        reached.add(document)
        left += [
            (document.parent / target.partition("#")[0]).resolve() for target in links(document) if target[0] != "#"
        ]
    assert set(DOCUMENTS) - reached == set()


def test_every_bound_names_a_test_that_exists():
    """In the tables of SECURITY.md, `::name` is a test of the file before it."""
    missing, file = [], None
    for row in re.findall(r"^\|.*\|$", (ROOT / "SECURITY.md").read_text(), re.M):
        for path, name in re.findall(r"`([\w/]*test_\w+\.py)?(?:::(\w+))?`", row.rsplit("|", 2)[1]):
            if path:
                places = [ROOT / "tests" / path, ROOT / "tests" / "gateway" / path]
                file = next((place for place in places if place.is_file()), None)
            if file is None or (name and f"def {name}(" not in file.read_text()):
                missing.append(f"{path}::{name}")
    assert file and not missing
