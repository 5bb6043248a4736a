"""The page at ``/``, in a real browser: headless Chromium, spoken to in its DevTools protocol over a pair of sockets."""

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from served import NAME, TEMPLATE, Running, hold, with_template

import wisparse
from wisparse.runtime.generation.engine import Delivery
from wisparse.runtime.model import Model

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
_FLAGS = "--headless --no-sandbox --no-first-run --hide-scrollbars --remote-debugging-pipe --disable-gpu --disable-quic"
_FLAGS += " --disable-background-networking --disable-component-update --disable-sync --disable-dev-shm-usage"
_SECONDS = 60.0


class Browser:
    """One process; what it keeps lies in ``folder``."""

    def __init__(self, program: str, folder: Path) -> None:
        self._channel, theirs = socket.socketpair()
        self._channel.settimeout(_SECONDS)
        # It reads file 3 and writes file 4.
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{theirs.fileno()} 4>&{theirs.fileno()}', program, *_FLAGS.split()]
        command += [f"--user-data-dir={folder}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], **quiet)
        theirs.close()
        self._held = b""
        self._sent = 0
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """A command's result; events that come meanwhile are kept in ``events``."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        message |= {} if session is None else {"sessionId": session}
        self._channel.sendall(json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                more = self._channel.recv(1 << 20)
                assert more, "the browser has ended"
                self._held += more
            line, _, self._held = self._held.partition(b"\0")
            answer: dict[str, Any] = json.loads(line)
            if answer.get("id") == self._sent:
                return answer["result"]  # type: ignore[no-any-return]
            self.events.append(answer)

    def close(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait(_SECONDS)


class Tab:
    """One page, in a context of its own: no storage is shared with another."""

    def __init__(self, browser: Browser, url: str, width: int = 1000, height: int = 800) -> None:
        self._browser = browser
        self._context = browser.ask("Target.createBrowserContext")["browserContextId"]
        target = browser.ask("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.ask(f"{domain}.enable")
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.ask("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.ask(method, self._session, **parameters)

    def value(self, script: str) -> Any:
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not self.value(script):
            assert time.monotonic() < deadline, f"not so in a minute: {script}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.ask("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        common: Mapping[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def events(self, method: str) -> list[dict[str, Any]]:
        self.value("0")  # what has come is read
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] == method]

    def complaints(self) -> list[dict[str, Any]]:
        """Errors of the page so far, what its policy forbade among them."""
        logged = [event["entry"] for event in self.events("Log.entryAdded")]
        return self.events("Runtime.exceptionThrown") + [entry for entry in logged if entry["level"] == "error"]

    def asked(self) -> list[str]:
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]

    def close(self) -> None:
        self._browser.ask("Target.disposeBrowserContext", browserContextId=self._context)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
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


def texts(tab: Tab, selector: str) -> list[str]:
    return tab.value(f"[...document.querySelectorAll({selector!r})].map((one) => one.textContent)")


def answers(tab: Tab) -> list[str]:
    return tab.value("turns.flatMap((turn) => turn.answers.map((answer) => answer.text))")


def status(tab: Tab) -> str:
    return tab.value("by('status').textContent")


def test_a_conversation(tab: Tab, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    start = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]
    first = model.generate(start, max_new_tokens=20).text
    whole = Delivery.generation
    monkeypatch.setattr(Delivery, "generation", lambda *given: replace(whole(*given), generation_seconds=0.125))
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


def test_side_by_side(browser: Browser, example_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_template(example_model, tmp_path, TEMPLATE, 0.3, 0.6)
    talk: list[Any] = [{"role": "user", "content": "what?"}]
    expected: dict[float, list[str]] = {}
    for level in (0.6, 0.0):
        with wisparse.load(folder, dtype="float32", backend="torch", max_seq_len=256, sparsity=level) as alone:
            first = alone.generate(talk, max_new_tokens=20).text
            follow = [*talk, {"role": "assistant", "content": first}, {"role": "user", "content": "and then?"}]
            expected[level] = [first, alone.generate(follow, max_new_tokens=20).text]
    assert expected[0.0] != expected[0.6]
    go_on = hold(monkeypatch, steps=4)
    with Running(folder) as server:
        tab = opened(browser, server)
        assert tab.value("by('in-force').hidden") is True
        assert tab.value("[...by('left').options].map((one) => one.text)") == ["Dense", "30% sparse", "60% sparse"]
        assert tab.value("[by('left').value, by('right').value]") == ["0.6", "0"]
        tab.value("by('both').checked = true")
        ask(tab, "what?")
        # It says which one runs; the other has not begun.
        tab.until("turns[0]?.answers[0]?.text")
        assert (status(tab), len(answers(tab))) == ("Answering, 60% sparse …", 1)
        go_on.set()
        tab.until("by('status').textContent.startsWith('Answered')")
        assert answers(tab) == [expected[0.6][0], expected[0.0][0]]
        assert texts(tab, ".answer .who") == ["60% sparse", "Dense"]
        speed = r"20 tokens, [\d.]+ tok/s"
        costs = texts(tab, ".answer .cost")
        assert all(re.fullmatch(speed, cost) for cost in costs), costs
        assert re.match(rf"Answered. 60% sparse: {speed}\. .*Dense: {speed}\. ", status(tab)), status(tab)
        left, right = tab.value("[...document.querySelectorAll('.answer')].map((one) => one.getBoundingClientRect().x)")
        assert left < right
        # Each side goes on with its own answer.
        ask(tab, "and then?")
        tab.until("document.querySelectorAll('.answer').length === 4 && running === null")
        assert (answers(tab)[2:], tab.complaints()) == ([expected[0.6][1], expected[0.0][1]], [])
        tab.close()


def test_escape_stops_an_answer(tab: Tab, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = hold(monkeypatch, steps=4)
    fill(tab, max_tokens=200)
    ask(tab, "what?")
    tab.until("turns[0]?.answers[0]?.text")
    assert tab.value("by('stop').hidden") is False
    assert tab.value("document.activeElement.id") == "stop"
    tab.press("Escape", 27)
    tab.until("by('status').textContent === 'Stopped.'")
    said = answers(tab)
    go_on.set()
    server.idle()
    assert answers(tab) == said
    assert tab.value("document.activeElement.id") == "message"


def test_what_a_model_says_is_text_and_a_refusal_is_told(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script><b>bold</b>"
    evil += "![i](data:image/png;base64,AA) [l](javascript:document.title=3)"
    next_chunk = Delivery.next_chunk
    monkeypatch.setattr(Delivery, "next_chunk", lambda self: replace(next_chunk(self), text=evil))
    fill(tab, max_tokens=1)
    ask(tab, evil)
    tab.until("by('status').textContent.startsWith('Answered')")
    assert [text.strip() for text in texts(tab, ".answer .words")] == answers(tab) == [evil]
    assert tab.value("document.querySelectorAll('#talk img, #talk script, #talk b, #talk a').length") == 0
    assert texts(tab, ".mine .words") == [evil]
    fill(tab, temperature=-1)
    ask(tab, "what?")
    tab.until("by('status').classList.contains('wrong')")
    assert "temperature: expected" in status(tab)
    assert tab.value("by('send').hidden") is False
    tab._browser.events.clear()  # the browser's log calls a status of 400 an error


def test_markdown_is_rendered_and_kept_on_reload(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "## Sum\n\n| a | b |\n|--:|---|\n| 1 | **2** |\n\n```python\nprint('<b>')\n```\n[docs](https://example.org)"
    next_chunk = Delivery.next_chunk
    monkeypatch.setattr(Delivery, "next_chunk", lambda self: replace(next_chunk(self), text=said))
    fill(tab, max_tokens=1, system="be brief")
    ask(tab, "what?")
    tab.until("by('status').textContent.startsWith('Answered')")
    tab.value("by('theme').value = 'dark', by('theme').dispatchEvent(new Event('change'))")
    for _ in range(2):
        assert texts(tab, ".answer pre code") == ["print('<b>')\n"]
        assert texts(tab, ".answer :is(h2, td.right, strong, .copy)") == ["Sum", "1", "2", "Copy"]
        assert tab.value("[document.querySelector('.answer a').href, document.querySelector('.answer a').rel]") == [
            "https://example.org/",
            "noopener noreferrer nofollow",
        ]
        assert (answers(tab), texts(tab, ".mine .words")) == ([said], ["what?"])
        assert tab.value("[by('system').value, by('max_tokens').value]") == ["be brief", "1"]
        assert tab.value("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        tab.ask("Page.reload")
        tab.until("document.readyState === 'complete' && document.title !== 'WiSparse' && turns.length === 1")
    tab.value("by('clear').click()")
    tab.ask("Page.reload")
    tab.until("document.readyState === 'complete' && document.title !== 'WiSparse' && model")
    assert answers(tab) == []


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, chat_bundle: Path, model: Model) -> None:
    with Running(chat_bundle, api_key="sesame") as server:
        tab = Tab(browser, address(server))
        # The first one fits in no header.
        for key, told in (("ключ", "ASCII"), ("wrong", "not know"), ("sesame", "")):
            tab.until("by('door').open")
            tab.type(key)
            tab.press("Enter", 13, "\r")
            tab.until(f"by('door-why').textContent.includes({told!r}) && by('door').open === {json.dumps(bool(told))}")
        tab.until(f"document.title.startsWith({NAME!r})")
        fill(tab, temperature=0, max_tokens=3)
        ask(tab, "a")
        tab.until("by('status').textContent.startsWith('Answered')")
        assert answers(tab) == [model.generate([{"role": "user", "content": "a"}], max_new_tokens=3).text]
        assert tab.value("sessionStorage.getItem('wisparse-key')") == "sesame"
        assert tab.value("[localStorage.length, document.cookie]") == [0, ""]
        assert all("sesame" not in url for url in tab.asked())
        tab.close()


@pytest.mark.parametrize(("width", "height"), [(360, 640), (320, 568), (640, 360), (900, 600)])
def test_controls_have_names_and_fit_the_window(browser: Browser, server: Running, width: int, height: int) -> None:
    tab = opened(browser, server, width=width, height=height)
    ask(tab, "x" * 300)
    tab.until("by('status').textContent.startsWith('Answered')")
    tab.value("by('settings').open = true")
    assert tab.value("document.documentElement.scrollWidth") <= width
    # Words of several lines run over nothing below them.
    over = "(one) => !['talk', 'settings'].includes(one.id) && one.scrollHeight > one.clientHeight + 1"
    assert tab.value(f"[...document.body.children].filter({over}).map((one) => one.id)") == []
    for name in ("send", "message"):
        top, bottom = tab.value(f"(({{top, bottom}}) => [top, bottom])(by({name!r}).getBoundingClientRect())")
        assert 0 <= top < bottom <= height, name
    # The last of the settings can be scrolled to.
    tab.value("by('max_tokens').scrollIntoView()")
    assert tab.value("by('max_tokens').getBoundingClientRect().top") >= 0
    assert tab.value("by('talk').clientHeight") >= 40
    kinds = ("textbox", "spinbutton", "button", "checkbox", "combobox")
    nodes = [node for node in tab.ask("Accessibility.getFullAXTree")["nodes"] if not node["ignored"]]
    names = [node["name"]["value"] for node in nodes if node["role"]["value"] in kinds]
    assert len(names) > 8
    assert [name for name in names if not name.strip()] == []
    for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 26)")):
        tab.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        assert tab.value("getComputedStyle(document.body).backgroundColor") == ground
    assert tab.complaints() == []
    tab.close()


def test_the_policy_forbids_what_is_inline_or_from_elsewhere(server: Running) -> None:
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        answer = server.request("GET", path)
        text = answer.read().decode()
        assert answer.status == 200
        assert answer.headers["content-type"].startswith(kind)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "://" not in text
