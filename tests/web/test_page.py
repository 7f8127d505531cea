"""The page of `flowrl ui` in a real Chromium: live, hostile and missing things, keyboard, sizes."""

import contextlib
import socket
from types import SimpleNamespace

import pytest

from flowrl.training.checkpoint import LATEST, claim
from flowrl.utils.journal import seal_line

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
SHAPES = ("circle", "square", "star", "cross", "ring")
STOPPED = {"reason": "interrupted", "complete": False, "detail": ""}


@pytest.fixture(scope="module")
def address(make_folder_in, tmp_path_factory, serve):
    root = tmp_path_factory.mktemp("page") / "runs"
    make_folder_in(root, "one", stop=STOPPED)
    make_folder_in(root, "other", recipe={"optim": {"lr": 5}})
    with serve(root) as address:
        yield address


@pytest.fixture
def page(page):
    yield page
    assert not page.faults


def opened(page, address: str, view: str = ""):
    """Open the page, and a view of it once it has its token."""
    page.goto(address)
    page.wait_for_selector("h1")
    if view:
        page.evaluate("view => { location.hash = view; }", view)
    return page


def reading(page, metric: str):
    return page.locator(f'[data-metric="{metric}"] .reading')


def test_a_value_appears_after_it_is_logged(page, make_folder_in, tmp_path, serve):
    folder = make_folder_in(tmp_path / "runs", "live")
    with serve(tmp_path / "runs") as address:
        opened(page, address, "#/run?run=live")
        page.wait_for_selector('[data-metric="reward/mean"] .value')
        assert reading(page, "reward/mean").inner_text() == "at 4: 0.4"
        names = page.locator("figcaption").all_inner_texts()
        assert names.index("brightness, held-out") < names.index("reward/mean")
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(seal_line({"step": 5, "reward/mean": 0.625}).decode() + "\n")
        page.wait_for_selector('[data-metric="reward/mean"] .reading:text("at 5: 0.625")')
        label = page.locator('[data-metric="reward/mean"] [role=img]').get_attribute("aria-label")
        assert "0.1 at 1, 0.625 at 5, lowest 0.1, highest 0.625" in label


def test_metrics_named_as_members_of_every_object_have_curves(
    page, make_folder_in, tmp_path, serve
):
    names = ("constructor", "__proto__", "toString")
    folder = make_folder_in(tmp_path / "runs", "constructor")
    with open(folder / "metrics.jsonl", "a") as file:
        for step in (5, 6):
            row = {"step": step} | {name: step / 8 for name in names}
            row |= {f"eval/{name}": 1.0 for name in names}
            row["reward/missing/__proto__"] = 0.5
            file.write(seal_line(row).decode() + "\n")
    with serve(tmp_path / "runs") as address:
        opened(page, address)
        page.get_by_role("link", name="constructor", exact=True).click()
        page.get_by_text("Choose metrics").click()
        for name in names:
            page.get_by_role("checkbox", name=name, exact=True).check()
            page.wait_for_selector(f'[data-metric="{name}"] .value:text("0.75")')
            page.wait_for_selector(f'[data-metric="eval/{name}"] .value:text("1")')
        page.get_by_role("row", name="__proto__ 50.0 % 50.0 %", exact=True).wait_for()


def test_hostile_names_prompts_and_words_are_text_and_what_is_missing_is_said(
    page, make_folder_in, tmp_path, serve
):
    root = tmp_path / "runs"
    prompts = (HOSTILE, "word " * 200_000, "x" * 1_000_000)
    stop = {"reason": "error", "complete": False, "detail": HOSTILE}
    name = HOSTILE.replace("/", "")
    folder = make_folder_in(root, name, prompts=prompts, stop=stop)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(seal_line({"step": 5, f"eval/{HOSTILE[:40]}": 1.0}).decode() + "\n")
    (folder / "samples" / "step-000004.png").write_bytes(b"\x89PNG\r\n\x1a\nno image")
    (folder / "samples" / "step-000006.png").write_text(HOSTILE)
    (folder / "evaluations" / "step-000008.safetensors").write_text(HOSTILE)
    with serve(root) as address:
        opened(page, address)
        page.get_by_role("link", name=name).click()
        page.wait_for_selector("text=The images of this evaluation cannot be read")
        page.wait_for_selector(".sheet .missing:not([hidden])")
        page.get_by_label("Held-out images over time").press("ArrowLeft")
        page.wait_for_selector(".pair img:not([hidden])")
        assert page.locator(".prompt").first.inner_text() == HOSTILE
        assert page.locator(".detail").inner_text() == HOSTILE
        lengths = page.locator(".prompt").evaluate_all("all => all.map(p => p.textContent.length)")
        assert len(lengths) == 3 and max(lengths) < 2100
        assert page.locator("h1").inner_text() == name
        page.set_viewport_size({"width": 390, "height": 844})
        assert too_wide(page) <= 0
    assert page.evaluate("window.hacked === undefined && !document.querySelector('img[src=x]')")


def too_wide(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - innerWidth")


def sent_to(server: socket.socket) -> bytes:
    """Return what was sent to a server: Chromium may open a connection and say nothing there."""
    data = b""
    with contextlib.suppress(TimeoutError):
        while True:
            connection, _ = server.accept()
            connection.settimeout(0.2)
            with connection, contextlib.suppress(TimeoutError):
                data += connection.recv(1000)
    return data


NAMELESS = """() => [...document.querySelectorAll(
    'main :is(input, select, textarea, button, a, img, progress, [role])')]
  .filter(e => e.checkVisibility())
  .filter(e => !(e.ariaLabel || e.alt || e.labels?.length || e.textContent.trim()))
  .map(e => e.outerHTML)"""


def test_all_that_can_be_used_has_a_name_and_nothing_is_asked_of_another_server_even_by_force(
    page, address
):
    base = address.partition("#")[0]
    for view in ("", "#/run?run=one", "#/compare", "#/start"):
        opened(page, address, view)
        page.wait_for_selector("main :is(.reading .value, .state, .start)")
        assert page.evaluate(NAMELESS) == [], view
    foreign = [url for url in page.asked if not url.startswith((base, f"blob:{base}"))]
    assert len(page.asked) > 12 and not foreign
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.settimeout(0.2)
        there = f"http://127.0.0.1:{other.getsockname()[1]}/"
        refused = page.evaluate(
            """async there => {
                const told = [];
                addEventListener("securitypolicyviolation", e => told.push(e.effectiveDirective));
                await fetch(there).catch(() => {});
                for (const tag of ["img", "script", "iframe"]) {
                    const made = document.createElement(tag);
                    made.src = there;
                    document.body.append(made);
                }
                document.body.insertAdjacentHTML("beforeend", "<p style='color:red'>");
                await new Promise(done => setTimeout(done, 100));
                return told.sort();
            }""",
            there,
        )
        assert not sent_to(other)
    wanted = ["connect-src", "frame-src", "img-src", "script-src-elem", "style-src-attr"]
    assert sorted(set(refused)) == wanted


def test_without_its_token_the_page_shows_nothing_and_asks_for_it(browser, address):
    base = address.partition("#")[0]
    context = browser.new_context()
    page = context.new_page()
    for start in (base, f"{base}#token=wrong"):
        page.goto(start)
        page.wait_for_selector("text=Open the address that flowrl ui printed")
        assert "one" not in page.locator("main").inner_text().split()
        page.goto("about:blank")
    page.goto(base)
    page.get_by_label("Token").fill("a-token")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="one", exact=True).wait_for()
    assert "token" not in page.url
    page.reload()  # the tab keeps it
    page.get_by_role("link", name="one", exact=True).wait_for()
    context.close()


# --- a run that is started ----------------------------------------------------------------------

PROMPTS = "\n".join(f"a {size} red {shape}" for size in ("small", "large") for shape in SHAPES)


@pytest.fixture
def commands(monkeypatch):
    """What the page starts, in place of starting it."""
    commands = []

    def start(command, **how):
        commands.append(command[3:])
        return SimpleNamespace(pid=1, poll=lambda: 0)

    monkeypatch.setattr("flowrl.web.jobs.subprocess.Popen", start)
    return commands


def test_the_keyboard_alone_resumes_a_run_and_stops_it(
    page, make_folder_in, tmp_path, serve, monkeypatch, commands
):
    monkeypatch.setattr("flowrl.web.jobs.Jobs.stop", lambda jobs, run: commands.append(run.name))
    folder = make_folder_in(tmp_path / "runs", "one", stop=STOPPED)
    with serve(tmp_path / "runs") as address:
        opened(page, address, "#/run?run=one")
        page.wait_for_selector(".state.stopped")
        tabs_to(page, "e.textContent === 'Resume'")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=Resuming")
        with claim(folder, resume=LATEST):
            page.wait_for_selector(".state.running")
            tabs_to(page, "e.textContent === 'Stop'")
            page.keyboard.press("Enter")
            page.wait_for_selector("text=Stopping")
    assert commands == [["train", "--resume", str(folder)], "one"]


def test_the_form_says_beside_a_field_why_it_is_refused_and_starts_what_it_accepts(
    page, serve, tmp_path, commands
):
    root = tmp_path / "runs"
    root.mkdir()
    with serve(root) as address:
        page.set_viewport_size({"width": 390, "height": 844})
        opened(page, address, "#/start")
        page.locator("[name=reward]").select_option("pickscore")
        page.get_by_text("which of two images people would pick").wait_for()
        page.get_by_label("Prompts, one").fill("a cat\na dog")
        page.get_by_role("button", name="Start", exact=True).click()
        page.wait_for_selector("#folder-fault:text('expected a name of letters')")
        assert page.evaluate("document.activeElement.name") == "folder"
        page.keyboard.insert_text("mine")
        page.get_by_role("button", name="Start", exact=True).click()
        page.wait_for_selector("#prompts-fault:text('at least 8')")
        assert page.evaluate("document.activeElement.name") == "prompts"
        assert page.locator("#folder-fault").inner_text() == "" and too_wide(page) <= 0
        page.get_by_label("Prompts, one").fill(PROMPTS)
        page.get_by_label("Iterations").fill("3")
        for button in ("Plan", "Dry run", "Start"):
            page.get_by_role("button", name=button, exact=True).click()
            page.wait_for_selector(f"section[aria-label='{button.lower()} mine']")
    (prompts,) = root.glob("prompts-*.txt")
    changes = [f'--prompts="{prompts}"', "--reward=pickscore", "run.iterations=3"]
    place = f'run.output_dir="{root / "mine"}"'
    assert commands == [
        ["plan", "quickstart", *changes], ["train", "quickstart", *changes, "--dry-run"],
        ["train", "quickstart", *changes, place],
    ]  # fmt: skip


def tabs_to(page, script: str) -> None:
    """Press Tab until the focused element is the one that `script` describes."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(f"(e => {script})(document.activeElement)"):
            outline = page.evaluate(
                "(e => { const s = getComputedStyle(e);"
                " return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2; })"
                "(document.activeElement)"
            )
            assert outline, script
            return
    raise AssertionError(f"Tab does not come to {script}")


def test_the_keyboard_alone_opens_a_run_reads_a_curve_moves_over_time_and_compares(page, address):
    opened(page, address)
    page.get_by_role("link", name="one", exact=True).wait_for()
    tabs_to(page, "e.className === 'skip'")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    tabs_to(page, "e.textContent === 'one'")
    page.keyboard.press("Enter")
    page.wait_for_selector('[data-metric="reward/mean"] .value')
    assert page.evaluate("document.activeElement.tagName") == "H1"
    page.wait_for_selector(".pair img:not([hidden])")
    tabs_to(page, "e.type === 'range' && !e.disabled")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("output:text('the base, before training')")
    page.wait_for_selector("figcaption:has-text('brightness 0')")
    tabs_to(page, "e.parentElement.dataset.metric === 'reward/mean'")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert reading(page, "reward/mean").inner_text() == "at 3: 0.3"
    page.keyboard.press("Home")
    assert reading(page, "reward/mean").inner_text() == "at 1: 0.1"
    tabs_to(page, "e.tagName === 'SUMMARY'")
    page.keyboard.press("Enter")
    tabs_to(page, "e.value === 'loss'")
    page.keyboard.press("Space")
    page.wait_for_selector('[data-metric="loss"] .value')
    assert page.evaluate("document.activeElement.value") == "loss"
    tabs_to(page, "e.tagName === 'SELECT'")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("th:has-text('optim.lr')")


def test_a_run_hands_out_its_results_as_files_to_keep(page, make_folder_in, tmp_path, serve):
    folder = make_folder_in(tmp_path / "runs", "one")
    (folder / "README.md").write_text(HOSTILE)
    (folder / "gallery").mkdir()
    (folder / "gallery" / "index.html").symlink_to("/etc/passwd")
    with serve(tmp_path / "runs") as address:
        opened(page, address, "#/run?run=one")
        with page.expect_download() as download:
            page.get_by_role("button", name="Save card").click()
        assert download.value.suggested_filename == "one-README.md"
        assert download.value.path().read_text() == HOSTILE
        assert page.get_by_role("button", name="Save", exact=False).count() == 1
    assert page.evaluate("window.hacked === undefined")
