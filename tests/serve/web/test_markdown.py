"""The page's Markdown: as markdown-it reads it, safe whatever a model writes, each letter traced to where it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from markdown_it import MarkdownIt
from playwright.sync_api import Browser, Page, expect

from tests.serve.web.conftest import Watched
from tests.serve.web.scripted_server import SAMPLE, ScriptedServer

DOCUMENTS = {
    "sample": SAMPLE,
    "styles": "Some **bold**, *slanted*, __bold__, _slanted_, ~~gone~~ and `code` with **a *nested* one**.",
    "not styles": "2 * 3 * 4, snake_case_name, a ** b ** c, 5*, `open, **open, \\*escaped\\* and a_b_c_",
    "code spans": "``a ` b`` and `**not bold**` and ` padded `",
    "headings": "# One\n\n## Two ##\n\n### Three `code`\ntext\n#no heading",
    "lists": "- a\n- b\n  - c\n    - d\n- e\n\ntext\n\n1. x\n2. y\n\n3) other",
    "loose list": "- a\n\n- b\n\n  more of b\n\nafter",
    "list from seven": "7. seven\n8. eight",
    "code in a list": "1. First:\n   ```sh\n   make\n     test\n   ```\n2. Second",
    "fences": "```python\nif a < b:\n    print('**x**')\n```\n\n~~~\n```\n~~~\n\n````md\n```\n````",
    "open fence": "```js\nlet a = 1;",
    "quote": "> one\n> two\n>\n> - item\n\nafter",
    "lazy quote": "> one\ntwo",
    "table": "| a | b | c |\n|:--|:-:|--:|\n| 1 | **2** | `3` |\n| x \\| y | | z |\n\nafter",
    "table without sides": "a | b\n--- | ---\n1 | 2",
    "rules": "a\n\n---\n\nb\n\n* * *\n\nc",
    "links": 'See [the **docs**](https://example.org/a_(b)?c=d "title") and <https://example.org>.',
    "html": "<b>not bold</b> &amp; <script>alert(1)</script>",
    "lines": "one\ntwo  \nthree",
    "tabs": "-\ta\n-\tb\n\t- c",
    "interrupted paragraph": "text\n- a\n- b\n\ntext\n2. not a list",
}
DANGERS = [
    *("<script>", "</script>", "<img src=x onerror=alert(1)>", "<svg/onload=alert(1)>", "<iframe src=javascript:1>"),
    *("[a](javascript:alert(1))", "[a](data:text/html,x)", "[a]( https://e.org )", '[a](https://e.org"onx=1)'),
    *('![a](x"onerror="alert(1))', "<a/href=//e.org>", '<https://e.org/"onx>', "[![a](https://e.org)](javascript:1)"),
    *("&lt;b&gt;", "&#60;", "`<b>`", "```", "~~~", "**a", "*b", "_c", "~~d**", ">", "- ", "1. ", "# ", "|", "\n|--|\n"),
    *("$", "$$", "\\(", "\\)", "\\[", "\\]", "$\\href{javascript:1}{a}$", "$x^2$", "\\(\\includegraphics{x}\\)"),
    *("[", "](", "\\", "`", "__", "*", "_", "é", "世", "🙂", "\n", "\n\n", "  ", "\t", " ", "\n    ", "\r\n"),
]
BLOCKS = {
    "p",
    "h3",
    "h4",
    "h5",
    "h6",
    "ul",
    "ol",
    "li",
    "input",
    "blockquote",
    "hr",
    "figure",
    "figcaption",
    "button",
    "pre",
}
ALLOWED = BLOCKS | {"code", "strong", "em", "del", "a", "span", "div", "table", "thead", "tbody", "tr", "th", "td"}

# Called with sources: what each becomes, and whatever about it is wrong.
CHECK = """async ([sources, allowed]) => {
  const { render } = await import('/text/markdown.js');
  const results = [];
  for (const source of sources) {
    const whole = document.createElement('div'), grown = document.createElement('div'), wrong = [];
    render(whole, source);
    for (let end = 0; end < source.length; end += 1 + (end * 7) % 5) render(grown, source.slice(0, end));
    render(grown, source);
    if (grown.innerHTML !== whole.innerHTML) wrong.push('grows to something else');
    for (const one of whole.querySelectorAll('.math *')) {
      if (/^(a|img|script|iframe|object|form|input)$/.test(one.localName)) wrong.push('math: ' + one.localName);
    }
    for (const math of whole.querySelectorAll('.math')) math.replaceChildren(); // KaTeX's own, with its styles
    for (const one of whole.querySelectorAll('*')) {
      if (!allowed.includes(one.localName)) wrong.push('element ' + one.localName);
      for (const { name, value } of one.attributes) {
        if (name.startsWith('on') || name === 'src' || name === 'style') wrong.push('attribute ' + name);
        if (name === 'href' && !/^(https?:\\/\\/|mailto:)/.test(value)) wrong.push('link to ' + value);
      }
    }
    const walker = document.createTreeWalker(whole, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const { data, at } = walker.currentNode;
      const line = data.replace(/\\n$/, '');
      const plain = source.replaceAll('\\r\\n', ' \\n');
      if (at !== undefined && plain.slice(at, at + line.length) !== line) wrong.push(`${data} is not at ${at}`);
    }
    results.push({ html: whole.innerHTML, wrong });
  }
  return results;
}"""


@pytest.fixture(scope="module")
def blank(browser: Browser) -> Iterator[Page]:
    """A page that only lends its modules."""
    server = ScriptedServer()
    server.thread.start()
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.url}/theme.js")
    yield page
    context.close()
    server.stopping.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def check(blank: Page) -> Any:
    return lambda sources: blank.evaluate(CHECK, [sources, sorted(ALLOWED)])


class Outline(HTMLParser):
    """A document as the elements that mean something, and its text."""

    NAMES = {"h1": "h3", "h2": "h4", "h3": "h5", "h4": "h6", "s": "del"}
    DROPPED = {"p", "span", "div", "figure", "button", "figcaption", "br", "input", "thead", "tbody"}

    def __init__(self, html: str, shifted: bool) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.names = {} if shifted else self.NAMES
        self.label = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.label += tag == "figcaption"
        facts = [f"{name}={value}" for name, value in attributes if name in ("href", "start")]
        self.note(tag, " ".join([self.names.get(tag, tag), *facts]))

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)

    def handle_endtag(self, tag: str) -> None:
        self.label -= tag == "figcaption"
        self.note(tag, f"/{self.names.get(tag, tag)}")

    def note(self, tag: str, what: str) -> None:
        if tag not in self.DROPPED:
            self.parts.append(f"<{what}>")
        elif tag == "p":
            self.parts.append(" ")

    def handle_data(self, data: str) -> None:
        if not self.label:
            self.parts.append(data)

    def __str__(self) -> str:
        return " ".join("".join(self.parts).replace("<", " <").replace(">", "> ").split())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_reads_as_markdown_it_does(check: Any, name: str) -> None:
    source = DOCUMENTS[name]
    [ours] = check([source])
    theirs = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).render(source)
    if name == "sample":  # bare addresses are links here
        theirs = theirs.replace(
            "https://example.org/moe", '<a href="https://example.org/moe">https://example.org/moe</a>'
        )
    assert str(Outline(ours["html"], shifted=True)) == str(Outline(theirs, shifted=False))
    assert ours["wrong"] == []


def fuzz(count: int) -> Iterator[str]:
    generator = random.Random(11)
    for _ in range(count):
        yield "".join(generator.choices(DANGERS, k=generator.randint(1, 25)))


def test_whatever_a_model_writes_is_only_text(check: Any) -> None:
    sources = list(fuzz(600))
    for source, result in zip(sources, check(sources), strict=True):
        assert result["wrong"] == [], source


@pytest.mark.parametrize(
    "piece",
    [
        "**a ",
        "[a](",
        "> ",
        "- a ",
        "`",
        "``a",
        "*_",
        "![",
        "1. ",
        "| a ",
        "~~a*b_",
        "\n\n# a",
        "- a\n",
        "$a ",
        "\\\\(a",
        "$$\n",
    ],
)
def test_long_nonsense_is_rendered_too(blank: Page, piece: str) -> None:
    # A quadratic renderer would need minutes, and run into the browser's limit.
    render = """async (text) => {
        const { render } = await import('/text/markdown.js');
        const to = document.createElement('div');
        render(to, text);
        return to.childElementCount;
    }"""
    assert blank.evaluate(render, piece * (200_000 // len(piece))) > 0


def test_formulas_are_set_by_katex_with_fonts_of_this_server(
    page: Page, server: ScriptedServer, watched: Watched
) -> None:
    server.answer = r"""Inline \(a^2\) and $b_1$, not $5 or $10.

\[
\int_0^1 x\,dx
\]

$$\boxed{c}$$

- in a list: $x$

`$code$` $\broken{$
"""
    page.fill("#prompt", "Hi")
    page.press("#prompt", "Enter")
    expect(page.locator(".facts")).to_contain_text("tokens")
    math = page.locator(".theirs .math")
    sources = page.locator(".theirs .math:not(.unread) annotation").all_text_contents()
    assert [source.strip() for source in sources] == ["a^2", "b_1", "\\int_0^1 x\\,dx", "\\boxed{c}", "x"]
    expect(page.locator(".theirs .math.display")).to_have_count(2)
    expect(math.first).to_have_css("white-space", "normal")
    expect(page.locator(".theirs > .body")).to_contain_text("not $5 or $10.")
    expect(page.locator(".theirs code")).to_have_text("$code$")
    expect(page.locator(".theirs .unread")).to_have_text("$\\broken{$")  # as it was written
    page.wait_for_function("() => document.fonts.check('16px KaTeX_Main')")
    fonts = [request.url for request in watched.requests if request.url.endswith(".woff2")]
    assert fonts and all(url.startswith(server.url) for url in fonts)


def test_no_script_of_a_model_runs(page: Page, server: ScriptedServer) -> None:
    server.answer = "\n\n".join(
        [
            "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>",
            "[click](javascript:window.hurt=1) **<svg/onload=window.hurt=1>**",
            "```html\n<script>window.hurt = 1</script>\n```",
            "| <img src=x onerror='window.hurt=1'> |\n|---|\n| <b>x</b> |",
        ]
    )
    server.reasoning = "<img src=x onerror='window.hurt = 1'>"
    page.fill("#prompt", "<img src=x onerror='window.hurt = 1'>")
    page.press("#prompt", "Enter")
    expect(page.locator(".facts")).to_contain_text("tokens")
    page.click(".reasoning summary")
    page.locator(".token").first.hover()
    assert page.evaluate("window.hurt") is None
    assert page.locator(".message :is(script, img, svg[onload], b)").count() == 0
    expect(page.locator(".mine > .body")).to_have_text("<img src=x onerror='window.hurt = 1'>")
    page.reload()
    expect(page.locator(".theirs > .body")).to_contain_text("<script>window.hurt = 1</script>")
    assert page.evaluate("window.hurt") is None


def test_even_markup_that_got_in_could_not_run_or_fetch(browser: Browser, server: ScriptedServer) -> None:
    context = browser.new_context()
    page = context.new_page()
    watched = Watched()
    watched.watch(page)
    page.goto(server.url)
    refused = "() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return String(error) } }"
    assert "TrustedHTML" in page.evaluate(refused)
    page.evaluate("""() => {
        const add = (name, attributes) => {
            const made = document.createElement(name);
            for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
            document.body.append(made);
            return made;
        };
        add('img', { src: 'https://example.org/x' });
        add('a', { href: 'javascript:hurt = 1' }).click();
        add('form', { action: 'https://example.org/y' }).submit();
        fetch('https://example.org/z').catch(() => { window.refused = true });
    }""")
    page.wait_for_function("() => window.refused")
    assert page.evaluate("window.hurt") is None
    assert sum("Content Security Policy" in error for error in watched.errors) >= 3
    asked = [request for request in watched.requests if "example.org" in request.url]
    assert all(request.failure == "csp" for request in asked)
    context.close()
