"""The chat page in a real browser (Debian's headless Chromium), on answers that are written down."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright
from playwright.sync_api import Error as PlaywrightError

from onekernel.engine.engine import Engine
from onekernel.errors import NumericError
from onekernel.server.app import create_app
from onekernel.server.service import Service
from onekernel.server.settings import ServerSettings
from tests.e2e.talk import Line, TalkBackend, byte_chat_tokenizer
from tests.unit.server.serving import serving, until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
KEY = "a key of the test"

HOSTILE = """<img src="https://example.org/a.png" onerror="alert(1)"> <script>alert(2)</script> </div></main>

[run](javascript:alert(3)) [data](data:text/html,<script>alert(4)</script>) ![picture](https://example.org/b.png)

- <svg onload=alert(5)>

| <b>a</b> | b |
|---|---|
| `<i>` | <iframe src="https://example.org"></iframe> |

```html "onclick=alert(6)
<style>body { display: none }</style>
```

[fine](https://example.org/"onmouseover="alert(7))"""

WIDE = f"""{"long" * 60}

```
{"code " * 60}
```

| {" | ".join(f"column {n}" for n in range(12))} |
|{"---|" * 12}
| {" | ".join("cell" for _ in range(12))} |
"""

LINES = {
    "hello": Line("Good **day** to you."),
    "slowly": Line("This answer takes its time. " * 40, delay_s=0.02),
    "think": Line("<think>\nFirst I *wonder*.\n</think>\n\nThen I say.", delay_s=0.002),
    "break": Line("Half an answer", error=NumericError("the logits of position 7 are not finite")),
    "break at once": Line("", error=NumericError("the logits of position 0 are not finite")),
    "hostile": Line(HOSTILE),
    "wide": Line(WIDE),
}


@dataclass
class Server:
    """Where the page is, and what the model behind it was asked."""

    url: str
    backend: TalkBackend
    engine: Engine


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with sync_playwright() as playwright:
        # A sandbox needs rights that a container may not give; the page is our own.
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start servers; they end with the module."""
    tokenizer = byte_chat_tokenizer(tmp_path_factory.mktemp("talk"))
    with contextlib.ExitStack() as stack:

        def make(**settings: object) -> Server:
            backend = TalkBackend(lines=LINES)
            engine = Engine(backend, tokenizer, {})
            stack.callback(engine.close)
            app = create_app(engine, ServerSettings(model_names=("talker",), **settings))  # type: ignore[arg-type]
            return Server(stack.enter_context(serving(app)), backend, engine)

        yield make


@pytest.fixture(scope="module")
def server(start: Callable[..., Server]) -> Server:
    return start()


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """The page in a browser that knows nothing yet; what it reports on its console fails the test."""
    with browser.new_context(viewport={"width": 900, "height": 700}) as context:
        page = context.new_page()
        page.set_default_timeout(10_000)
        problems: list[str] = []

        def note(message: ConsoleMessage) -> None:
            # A refused or lost connection is reported by the browser itself, whatever the page does about it.
            if message.type == "error" and "Failed to load resource" not in message.text:
                problems.append(message.text)

        page.on("console", note)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"a dialog: {dialog.message}"))
        page.goto(server.url)
        expect(page.locator("#model")).to_have_text("talker")
        yield page
        assert not problems


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


def answered(page: Page) -> None:
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def last_answer(page: Page) -> Page:
    return page.locator("article.answer").last  # type: ignore[return-value]


def test_an_answer_streams_and_its_speed_is_shown(page: Page, start: Callable[..., Server]) -> None:
    ask(page, "slowly")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(last_answer(page)).to_contain_text("takes its time")
    assert last_answer(page).inner_text().count("time") < 40  # it was not all there at once
    expect(page.locator("#time")).to_have_text(re.compile(r"^[\d,]+ µs/token$"))
    page.keyboard.press("Escape")
    ask(page, "hello")
    expect(last_answer(page).locator("strong")).to_have_text("day")
    answered(page)
    expect(page.locator("#ttft")).to_have_text(re.compile(r"^[\d.,]+ m?s$"))
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[\d.,]+ tok/s$"))
    expect(page.locator("#share")).to_be_hidden()  # this server does not know the read limit
    expect(page.get_by_role("status")).to_have_text("Answer complete.")


def test_stop_keeps_what_was_said_and_ends_the_request(page: Page, server: Server) -> None:
    ask(page, "slowly")
    expect(last_answer(page)).to_contain_text("This answer")
    page.get_by_role("button", name="Stop").click()
    expect(last_answer(page)).to_contain_text("Stopped.")
    expect(last_answer(page)).to_contain_text("This answer")
    until(lambda: server.backend.open_sequences == 0)
    expect(page.get_by_label("Your message")).to_be_focused()
    ask(page, "hello")
    answered(page)
    # The model sees what the reader saw.
    assert re.search(r"user: slowly\nassistant: This answer.*\nuser: hello", server.backend.prompts[-1])


def test_a_reload_keeps_the_conversation_and_a_new_chat_forgets_it(page: Page) -> None:
    ask(page, "hello")
    answered(page)
    ask(page, "slowly")
    expect(last_answer(page)).to_contain_text("This answer")
    page.reload()
    expect(page.locator("article")).to_have_count(4)
    expect(page.locator("article.answer").first).to_contain_text("Good day to you.")
    expect(last_answer(page)).to_contain_text(re.compile(r"This answer.*Stopped\.", re.DOTALL))
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()
    page.reload()
    expect(page.locator("article")).to_have_count(0)


def test_an_error_is_shown_and_can_be_tried_again(page: Page, server: Server) -> None:
    ask(page, "break")
    alert = last_answer(page).get_by_role("alert")
    expect(alert).to_contain_text("logits of position 7 are not finite")
    expect(last_answer(page)).to_contain_text("Half an answer")
    ask(page, "break at once")
    expect(alert).to_contain_text("logits of position 0 are not finite")
    page.get_by_role("button", name="Try again").click()
    expect(alert).to_contain_text("logits of position 0 are not finite")
    expect(page.locator("article")).to_have_count(4)
    ask(page, "hello")
    expect(last_answer(page)).to_contain_text("Good day")
    assert "at once" not in server.backend.prompts[-1]  # a question without an answer is not part of the chat


def test_a_server_that_is_gone_is_an_error(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort())
    ask(page, "hello")
    expect(last_answer(page).get_by_role("alert")).to_contain_text("cannot be reached")
    answered(page)


def test_a_server_that_still_loads_is_shown_and_waited_for(page: Page, start: Callable[..., Server]) -> None:
    loading = Service(ServerSettings(model_names=("talker",)))
    with serving(create_app(loading)) as url:
        page.goto(url)
        expect(page.locator("#model")).to_have_text("talker, loading …")
        ask(page, "hello")
        expect(last_answer(page).get_by_role("alert")).to_contain_text("still loading")
        loading.ready(start().engine)
        expect(page.locator("#model")).to_have_text("talker")
        page.get_by_role("button", name="Try again").click()
        expect(last_answer(page)).to_contain_text("Good day")


def test_an_answer_cannot_inject_markup(page: Page, server: Server) -> None:
    addresses: set[str] = set()
    page.on("request", lambda request: addresses.add(request.url))
    ask(page, "hostile")
    answered(page)
    shown = last_answer(page)
    for text in (
        'onerror="alert(1)">',
        "<script>alert(2)</script>",
        "<svg onload=alert(5)>",
        "javascript:alert(3)",
        "<i>",
    ):
        expect(shown).to_contain_text(text)
    assert shown.locator("img, script, svg, style, iframe, i, b, [onclick], [onmouseover]").count() == 0
    targets = [link.get_attribute("href") or "" for link in shown.get_by_role("link").all()]
    assert targets and all(target.startswith("https://example.org/") for target in targets)
    page.reload()
    expect(last_answer(page)).to_contain_text("<script>alert(2)</script>")
    assert {address.removeprefix(server.url)[:4] for address in addresses} <= {"/", "/v1/", "/sta"}


def test_the_policy_allows_no_inline_script_and_nothing_from_elsewhere(browser: Browser, server: Server) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        response = page.goto(server.url)
        assert response is not None
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert not re.search(r"https?:", policy)
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", response.text())
        with pytest.raises(PlaywrightError, match="TrustedHTML"):
            page.evaluate("document.body.innerHTML = '<b>x</b>'")


MARKDOWN = [
    (
        "a *b* **c** ***d*** `e<` ~~f~~",
        "<p>a <em>b</em> <strong>c</strong> <strong><em>d</em></strong> <code>e&lt;</code> <s>f</s></p>",
    ),
    ("2 * 3 * 4 a_b_c 5*6", "<p>2 * 3 * 4 a_b_c 5*6</p>"),
    (r"\*not\* **open", "<p>*not* **open</p>"),
    ("one\ntwo\n\nthree", "<p>one<br>two</p><p>three</p>"),
    ("# Title #\n## Next", "<h3>Title</h3><h4>Next</h4>"),
    ("- a\n- b\n  1. c\n  2. d\n- e", "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li><li>e</li></ul>"),
    ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    ("a\n\n---\nb", "<p>a</p><hr><p>b</p>"),
    ("1. a\n   ```\n   b\n   ```", "<ol><li>a<pre>b</pre></li></ol>"),
    ("```py\nx = '<b>'\n\n# y\n```\nz", "<pre>x = '&lt;b&gt;'\n\n# y</pre><p>z</p>"),
    ("~~~\nstill open", "<pre>still open</pre>"),
    (
        "|a|b|\n|-|-:|\n|1 \\| 2|`3`|\nend",
        "<table><tr><th>a</th><th>b</th></tr><tr><td>1 | 2</td><td><code>3</code></td></tr></table><p>end</p>",
    ),
    ("(https://a.org/x_(y)_z).", "<p>(<a>https://a.org/x_(y)_z</a>).</p>"),
    ("[t](ftp://a.org) [](https://b.org)", "<p>[t](ftp://a.org) <a>https://b.org</a></p>"),
    (">" * 5000 + "deep " + "- " * 500 + "*_" * 5000, None),
]

RENDER = """async ([text, stepwise]) => {
  const { renderMarkdown } = await import("/static/markdown.js");
  const target = document.createElement("div");
  const ends = stepwise ? [...text].map((_, index) => index + 1) : [text.length];
  for (const end of ends) renderMarkdown(target, text.slice(0, end));
  for (const code of target.querySelectorAll(".code")) {
    const pre = document.createElement("pre");
    pre.textContent = code.querySelector("pre").textContent;
    code.replaceWith(pre);
  }
  return target.innerHTML
    .replaceAll(/ (class|title|target|rel|href|tabindex|role|aria-label)="[^"]*"/g, "")
    .replaceAll(/<\\/?(div|thead|tbody)>/g, "");
}"""


def test_markdown_becomes_elements_however_it_is_cut_into_pieces(page: Page) -> None:
    for text, expected in MARKDOWN:
        whole = page.evaluate(RENDER, [text, False])
        if expected is not None:
            assert whole == expected
            assert page.evaluate(RENDER, [text, True]) == expected


def test_thinking_is_folded(page: Page) -> None:
    ask(page, "think")
    answered(page)
    expect(last_answer(page)).to_contain_text("Then I say.")
    expect(last_answer(page).get_by_text("First I wonder.")).to_be_hidden()
    last_answer(page).get_by_text("Thoughts").click()
    expect(last_answer(page).get_by_text("First I wonder.")).to_be_visible()


def test_settings_are_sent_and_kept(page: Page, server: Server) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Seed").fill("77")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Done").click()
    page.reload()
    ask(page, "hello")
    answered(page)
    assert (server.backend.samplings[-1].temperature, server.backend.samplings[-1].seed) == (0.25, 77)
    assert server.backend.prompts[-1].startswith("system: Be brief.\nuser: hello")


def test_an_api_key_is_asked_for_and_used(page: Page, start: Callable[..., Server]) -> None:
    page.goto(start(api_key=KEY).url)
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    field.fill("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("needs an API key")
    field.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("talker")
    expect(field).to_be_hidden()
    ask(page, "hello")
    expect(last_answer(page)).to_contain_text("Good day")
    assert KEY not in str(page.evaluate("JSON.stringify(localStorage)"))


AUDIT = (Path(__file__).parent / "page_audit.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_names_contrasts_and_targets(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 21, 20)"
    assert dark == (scheme == "dark")
    assert page.evaluate(AUDIT) == []
    for question in ("wide", "break", "think", "hostile"):
        ask(page, question)
        answered(page)
    assert page.evaluate(AUDIT) == []
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(AUDIT) == []


def test_the_keyboard_reaches_everything(page: Page) -> None:
    ask(page, "wide")
    answered(page)
    page.evaluate("document.activeElement.blur()")
    reached = []
    for _ in range(10):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent.trim()"))
    expected = [
        "Skip to the message box",
        "New chat",
        "Settings",
        "Copy code",
        "code",
        "Table",
        "Copy answer",
        "Try again",
    ]
    assert [name for name in reached if name in expected] == expected
    page.get_by_role("button", name="Settings").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog", name="Settings")).to_be_visible()
    expect(page.get_by_label("System prompt")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.get_by_role("button", name="Settings")).to_be_focused()


def test_a_screen_reader_hears_whole_answers(page: Page) -> None:
    log = page.get_by_role("log", name="Conversation")
    assert log.get_attribute("aria-live") == "polite"
    ask(page, "slowly")
    expect(last_answer(page)).to_have_attribute("aria-busy", "true")
    expect(page.get_by_role("status")).to_have_text("Answering …")
    page.keyboard.press("Escape")
    expect(last_answer(page)).to_have_attribute("aria-busy", "false")
    expect(page.get_by_role("status")).to_have_text("Stopped.")


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_in_one_direction(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 640})
    for question in ("wide", "hostile"):
        ask(page, question)
        answered(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    for name in ("New chat", "Settings", "Send"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
    page.get_by_role("button", name="Settings").click()
    box = page.get_by_role("dialog").bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width


def test_per_cent_of_the_read_limit(page: Page, server: Server) -> None:
    def with_limit(route: object) -> None:
        response = route.fetch()  # type: ignore[attr-defined]
        models = response.json()
        models["data"][0]["onekernel"] = {"read_limit_us": 1000.0}
        route.fulfill(response=response, json=models)  # type: ignore[attr-defined]

    page.route("**/v1/models", with_limit)
    page.reload()
    expect(page.locator("#model")).to_have_text("talker")
    ask(page, "think")
    answered(page)
    us = int(page.locator("#time").inner_text().split()[0].replace(",", ""))
    shown = int(page.locator("#share").inner_text().removesuffix(" %"))
    assert us >= 2000  # each token of this answer waits that long
    assert shown == pytest.approx(100 * 1000 / us, abs=1)
