"""What the console's files may hold, and whether its colours can be told apart."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from tests.gateway.console.test_console import FILLED

PARSES_TEXT = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|https?://(?!www\.w3)"
BADGE = re.compile(
    r"([^{}\n]*\.badge[^{}]*) \{ color: var\(--([a-z]+)\); "
    r"background: color-mix\(in oklab, var\(--([a-z]+)\), transparent (\d+)%\)"
)
TOO_FAINT = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const paint = (colour, alpha) => {
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
    const [r, g, b] = parts.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (element) => {
    const parents = [];
    for (let node = element; node; node = node.parentElement) parents.unshift(node);
    let [alpha, ground] = [1, paint("white", 1)];
    for (const node of parents) {
      const style = getComputedStyle(node);
      alpha *= Number(style.opacity);
      ground = paint(style.backgroundColor, alpha);
    }
    const style = getComputedStyle(element);
    const text = paint(element instanceof SVGElement ? style.fill : style.color, alpha);
    return (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
  };
  const faint = [];
  const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (words.nextNode()) {
    const element = words.currentNode.parentElement;
    const shown = words.currentNode.textContent.trim() && element.checkVisibility();
    if (!shown || element.closest(":disabled, option")) continue;
    const found = contrast(element);
    if (found < 4.5) faint.push(`${found.toFixed(2)} ${element.className} ${words.currentNode.textContent}`);
  }
  return faint;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_word_can_be_read_and_when_what_is_shown_is_old_too(console, scheme):
    page, operations = console.page, console.gateway.gateway_app.operations
    page.emulate_media(color_scheme=scheme)
    operations.of("").history.add({"tokens_per_second": 9.0, "interactive.ttft_at_goal": 0.4})
    assert (console.chat().status_code, console.chat(model="none").status_code) == (200, 404)
    console.enter()
    for view, filled in FILLED.items():
        page.get_by_role("link", name=view.capitalize()).click()
        page.locator(filled).first.wait_for()
        assert page.evaluate(TOO_FAINT) == [], view
    page.get_by_role("button", name="Recent").click()
    page.locator(".ended .badge").nth(1).wait_for()
    assert page.evaluate(TOO_FAINT) == []
    console.gateway.gateway_app.engine.ready = False
    page.get_by_text("What you see is old").wait_for()
    assert page.locator(".stale").count() == 1 and page.evaluate(TOO_FAINT) == []
    page.evaluate("document.querySelector('#content').style.opacity = 0.55")
    assert page.evaluate(TOO_FAINT) != [], "faded text would be found"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_borders_placeholders_and_banners_can_be_told_apart(scheme):
    """WCAG 2.2 AA: 4.5 to 1 for text, 3 to 1 for the borders of what can be typed into or pressed."""
    css = "".join(resources.files("gateway.console").joinpath(name).read_text() for name in ("style.css", "views.css"))
    pairs = re.findall(r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", css)
    colour = {name: (light if scheme == "light" else dark) for name, light, dark in pairs}
    for text in ("text", "muted", "accent", "warn", "bad", "good", "interactive", "batch"):
        for ground in ("ground", "surface"):
            assert contrast(colour[text], colour[ground]) >= 4.5, (text, ground)
    assert contrast(colour["muted"], colour["raised"]) >= 4.5
    assert contrast(colour["warn"], mixed(colour["warn"], colour["ground"], 0.12)) >= 4.5
    badges = BADGE.findall(css)
    assert len(badges) >= 7
    for names, tone, ground, clear in badges:
        assert tone == ground, names
        back = mixed(colour[tone], colour["surface"], 1 - int(clear) / 100)
        assert contrast(colour[tone], back) >= 4.5, names
    for ground in ("ground", "surface", "raised"):
        assert contrast(colour["strong-line"], colour[ground]) >= 3, ground


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def mixed(one: str, other: str, share: float) -> str:
    pairs = [(int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in pairs)


def test_no_file_of_the_page_can_make_code_of_text():
    files = [entry for entry in resources.files("gateway.console").iterdir() if entry.name.endswith((".js", ".html"))]
    assert len(files) > 8
    for entry in files:
        text = entry.read_text()
        found = re.search(PARSES_TEXT, text)
        assert found is None, (entry.name, found)
    page = resources.files("gateway.console").joinpath("index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]* src=)", page)
