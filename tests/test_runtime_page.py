"""The page at ``/``, in a real browser."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Tab, find_chromium
from served import NAME, TEMPLATE, Running, with_template

import wisparse
from wisparse.runtime.generation.request import Chunk, Request
from wisparse.runtime.model import Model
from wisparse.runtime.torch.decoder import TorchDecoder

PROGRAM = find_chromium()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def bundle(example_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_template(example_model, tmp_path_factory.mktemp("page"), TEMPLATE)


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Running]:
    running = Running(bundle)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with wisparse.load(bundle, dtype="float32", backend="torch", max_seq_len=256) as model:
        yield model


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def tab(browser: Browser, server: Running) -> Iterator[Tab]:
    tab = opened(browser, server)
    yield tab
    assert tab.complaints() == []
    assert all(url.startswith((address(server), "data:", "about:")) for url in tab.asked())
    tab.close()


def address(server: Running) -> str:
    return f"http://127.0.0.1:{server.port}/"


def opened(browser: Browser, server: Running, **size: int) -> Tab:
    tab = Tab(browser, address(server), **size)
    tab.until(f"document.title.startsWith({NAME!r})")
    fill(tab, temperature=0, max_tokens=20)
    return tab


def fill(tab: Tab, **fields: Any) -> None:
    for name, value in fields.items():
        tab.value(f"by({name!r}).value = {str(value)!r}")


def ask(tab: Tab, question: str) -> None:
    tab.value("by('message').focus()")
    tab.type(question)
    tab.press("Enter", 13, "\r")


def answers(tab: Tab) -> list[str]:
    found: list[str] = tab.value("[...document.querySelectorAll('.answer .words')].map((box) => box.textContent)")
    return found


def status(tab: Tab) -> str:
    found: str = tab.value("by('status').textContent")
    return found


def test_a_conversation(tab: Tab, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    start = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]
    first = model.generate(start, max_new_tokens=20).text
    whole = Request.generation
    monkeypatch.setattr(Request, "generation", lambda *given: replace(whole(*given), generation_seconds=0.125))
    fill(tab, system="be brief")
    ask(tab, "what?")
    tab.until("by('status').textContent.startsWith('Answered')")
    assert answers(tab) == [first]
    # 19 after the first in the server's eighth of a second, however they came to the reader.
    assert status(tab).startswith("Answered. 20 tokens, 152.0 tok/s. The longest answer"), status(tab)
    talk = [*start, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
    ask(tab, "and then?")
    tab.until("document.querySelectorAll('.answer').length === 2 && running === null")
    assert answers(tab) == [first, model.generate(talk, max_new_tokens=20).text]  # type: ignore[arg-type]
    fill(tab, max_tokens=5)
    tab.value("by('again').click()")
    tab.until("running === null")
    assert answers(tab) == [first, model.generate(talk, max_new_tokens=5).text]  # type: ignore[arg-type]
    tab.value("by('clear').click()")
    assert answers(tab) == []


def test_dense_and_sparse_side_by_side(
    browser: Browser, example_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = with_template(example_model, tmp_path, TEMPLATE, 0.3, 0.6)
    talk: list[Any] = [{"role": "user", "content": "what?"}]
    expected: dict[float, list[str]] = {}
    for level in (0.6, 0.0):
        with wisparse.load(folder, dtype="float32", backend="torch", max_seq_len=256, sparsity=level) as alone:
            first = alone.generate(talk, max_new_tokens=20).text
            follow = [*talk, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
            expected[level] = [first, alone.generate(follow, max_new_tokens=20).text]
    assert expected[0.0] != expected[0.6]
    decode, go_on = TorchDecoder.decode, threading.Event()

    def held(self: Any, token_ids: Any) -> Any:
        assert go_on.wait(60)
        return decode(self, token_ids)

    monkeypatch.setattr(TorchDecoder, "decode", held)
    server = Running(folder)
    try:
        tab = opened(browser, server)
        assert tab.value("by('in-force').hidden") is True
        assert tab.value("[...by('left').options].map((one) => one.text)") == ["Dense", "30% sparse", "60% sparse"]
        assert tab.value("[by('left').value, by('right').value]") == ["0.6", "0"]
        tab.value("by('both').checked = true")
        ask(tab, "what?")
        # It says which one runs; the other has not begun.
        tab.until("document.querySelector('.answer .words')?.textContent")
        assert status(tab) == "Answering, 60% sparse …"
        assert len(answers(tab)) == 1
        go_on.set()
        tab.until("by('status').textContent.startsWith('Answered')")
        assert answers(tab) == [expected[0.6][0], expected[0.0][0]]
        assert tab.value("[...document.querySelectorAll('.answer .who')].map((one) => one.textContent)") == [
            "60% sparse", "Dense"
        ]  # fmt: skip
        speed = r"20 tokens, [\d.]+ tok/s"
        costs = tab.value("[...document.querySelectorAll('.answer .cost')].map((one) => one.textContent)")
        assert all(re.fullmatch(speed, cost) for cost in costs), costs
        assert re.match(rf"Answered. 60% sparse: {speed}\. .*Dense: {speed}\. ", status(tab)), status(tab)
        left, right = tab.value("[...document.querySelectorAll('.answer')].map((one) => one.getBoundingClientRect().x)")
        assert left < right
        # Each side goes on with its own answer.
        ask(tab, "and then?")
        tab.until("document.querySelectorAll('.answer').length === 4 && running === null")
        assert answers(tab)[2:] == [expected[0.6][1], expected[0.0][1]]
        assert tab.complaints() == []
        tab.close()
    finally:
        server.stop()


def test_escape_stops_an_answer(tab: Tab, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    decode = TorchDecoder.decode

    def held(self: Any, token_ids: Any) -> Any:
        assert go_on.wait(60)
        return decode(self, token_ids)

    monkeypatch.setattr(TorchDecoder, "decode", held)
    fill(tab, max_tokens=200)
    ask(tab, "what?")
    tab.until("document.querySelector('.answer .words')?.textContent")
    assert tab.value("by('stop').hidden") is False
    assert tab.value("document.activeElement.id") == "stop"
    said = answers(tab)
    tab.press("Escape", 27)
    tab.until("by('status').textContent === 'Stopped.'")
    go_on.set()
    server.idle()
    assert answers(tab) == said
    assert tab.value("document.activeElement.id") == "message"


def test_what_a_model_says_is_text(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script><b>bold</b>"
    next_chunk = Request.next_chunk

    def replaced(self: Request) -> Chunk:
        return replace(next_chunk(self), text=evil)

    monkeypatch.setattr(Request, "next_chunk", replaced)
    fill(tab, max_tokens=1)
    ask(tab, evil)
    tab.until("by('status').textContent.startsWith('Answered')")
    assert answers(tab) == [evil]
    assert tab.value("document.querySelectorAll('#talk img, #talk script, #talk b').length") == 0
    assert tab.value("document.querySelector('.mine .words').textContent") == evil


def test_a_refusal_is_told(tab: Tab) -> None:
    fill(tab, temperature=-1)
    ask(tab, "what?")
    tab.until("by('status').classList.contains('wrong')")
    assert "temperature: expected" in status(tab)
    assert tab.value("by('send').hidden") is False
    tab._browser.events.clear()  # the browser's log calls a status of 400 an error


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, bundle: Path, model: Model) -> None:
    server = Running(bundle, api_key="sesame")
    try:
        tab = Tab(browser, address(server))
        for key in ("wrong", "sesame"):
            tab.until("by('door').open")
            tab.type(key)
            tab.press("Enter", 13, "\r")
            tab.until("by('door-why').textContent || !by('door').open")
        tab.until(f"document.title.startsWith({NAME!r})")
        fill(tab, temperature=0, max_tokens=3)
        ask(tab, "a")
        tab.until("by('status').textContent.startsWith('Answered')")
        assert answers(tab) == [model.generate([{"role": "user", "content": "a"}], max_new_tokens=3).text]
        assert tab.value("sessionStorage.getItem('wisparse-key')") == "sesame"
        assert tab.value("[localStorage.length, document.cookie]") == [0, ""]
        assert all("sesame" not in url for url in tab.asked())
        tab.close()
    finally:
        server.stop()


def test_every_control_has_a_name_and_fits_a_phone(browser: Browser, server: Running) -> None:
    tab = opened(browser, server, width=320, height=640)
    tab.value("by('settings').open = true")
    ask(tab, "x" * 300)
    tab.until("by('status').textContent.startsWith('Answered')")
    assert tab.value("document.documentElement.scrollWidth") <= 320
    # Words of several lines run over nothing below them.
    over = "(one) => one.id !== 'talk' && one.scrollHeight > one.clientHeight + 1"
    assert tab.value(f"[...document.body.children].filter({over}).map((one) => one.id)") == []
    controls = [
        node
        for node in tab.ask("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"] and node["role"]["value"] in ("textbox", "spinbutton", "button", "checkbox", "combobox")
    ]
    assert len(controls) > 8
    assert [node for node in controls if not node["name"]["value"].strip()] == []
    grounds = []
    for scheme in ("light", "dark"):
        tab.colours(scheme)
        grounds.append(tab.value("getComputedStyle(document.body).backgroundColor"))
    assert grounds == ["rgb(255, 255, 255)", "rgb(20, 23, 26)"]
    assert tab.complaints() == []
    tab.close()


def test_the_policy_forbids_what_is_inline_or_from_elsewhere(server: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "://" not in text
    connection.close()
