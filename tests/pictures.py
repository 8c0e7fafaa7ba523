"""The pictures of the dashboard in docs/images: `make pictures`.

A real cluster under a replayed trace with two classes and two tenants: some minutes of normal load, overload,
a worker that is killed. Chromium looks at it in both themes. pngquant makes the pictures small. Then a
mixture of experts, in a cluster of its own under a load of one class (`--of experts`: that alone).

`python -m tests.pictures FOLDER` writes the committed ones; `--every-size` adds what laptops and walls show
of all pages, for people who change the layout.
"""

import argparse
import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil

from baton.config import AccessConfig, Config
from baton.core.messages import Role
from baton.core.operate import ReplicaState, Scale
from baton.files.token_places import new_token
from baton.wire.transport import secure
from tests.integration.browser import chromium, sign_in
from tests.integration.cluster import ROOT, Cluster, eventually
from tests.integration.dashboards import dashboard_url, settings_with_dashboard
from tests.integration.operating import Operator
from tests.models import make_model

COLORS = 256
"""Number of colours of a picture's palette."""

BYTES_MAX = 150_000
LAPTOP = {"width": 1440, "height": 900}
WALL = {"width": 1920, "height": 1080}
SIZES = {
    "laptop-small": {"width": 1366, "height": 768},
    "laptop": LAPTOP,
    "wall": WALL,
    "wall-4k": {"width": 3840, "height": 2160},
    "tablet": {"width": 1024, "height": 768},
}
PAGES = {"overview": "/", "workers": "/workers", "requests": "/requests", "decisions": "/decisions"}
CLASSES = {
    "interactive": {"ttft_s": 2.0, "tpot_s": 0.2, "late": "refuse", "queue_max": 48},
    "batch": {"ttft_s": 20.0, "priority": 10},
}
TENANTS = ("acme", "umbra")
SWING, SWING_S = 0.35, 80.0
"""The load swings by this share up and down, with these seconds from peak to peak."""


class Person:
    """A person who looks at the dashboard and takes pictures of it."""

    def __init__(self, browser, url, token, folder, *, every_size):
        self._browser, self._url, self._token = browser, url, token
        self._folder, self._every_size = folder, every_size

    def look(self, name, *, path="/", window="15 min", size=LAPTOP, dark=False):
        with self._browser.person(size=size, dark=dark) as page:
            sign_in(page, self._url, self._token)
            if path == "/":
                page.get_by_role("button", name=window, exact=True).click()
            else:
                page.goto(f"{self._url}{path}")
                page.wait_for_selector(".page section")
            page.wait_for_timeout(2500)  # the page updates once a second
            target = self._folder / f"{name}.png"
            page.screenshot(path=str(target))
            if self._every_size:
                target.with_suffix(".html").write_text(page.content())
        _shrink(target)

    def card(self, name, title, *, dark=False):
        """A picture of one card of the overview."""
        with self._browser.person(size=LAPTOP, dark=dark) as page:
            sign_in(page, self._url, self._token)
            page.wait_for_timeout(2500)
            target = self._folder / f"{name}.png"
            page.get_by_role("region", name=title).screenshot(path=str(target))
        _shrink(target)

    def look_at_all(self, moment):
        if not self._every_size:
            return
        for size_name, size in SIZES.items():
            for theme in ("light", "dark"):
                self.look(f"all-{moment}-{size_name}-{theme}", size=size, dark=theme == "dark")

    def look_at_pages(self):
        if not self._every_size:
            return
        for size_name in ("laptop-small", "wall"):
            for page_name, path in PAGES.items():
                self.look(f"all-page-{page_name}-{size_name}", path=path, size=SIZES[size_name])

    def record(self, name):
        """A picture of the latency breakdown of a request that met its objectives."""
        with self._browser.person(size=LAPTOP) as page:
            sign_in(page, self._url, self._token)
            page.goto(f"{self._url}/requests")
            table = page.get_by_role("table", name="Requests")
            table.locator("tbody tr", has_text="completed").first.get_by_role("link").click()
            page.get_by_role("table", name="RecentRequest").wait_for()
            page.wait_for_timeout(1500)
            target = self._folder / f"{name}.png"
            page.screenshot(path=str(target))
        _shrink(target)


def _shrink(path):
    """Reduce a picture to a palette, which loses nothing visible in surfaces and text."""
    small = path.with_suffix(".small.png")
    subprocess.run(
        ["pngquant", "--force", "--strip", "--speed", "1", "--output", small, str(COLORS), path], check=True
    )
    small.replace(path)
    assert path.stat().st_size < BYTES_MAX or path.name.startswith("all-"), f"{path} is too large"


class Load:
    """Several `baton replay`s that run at the same time until they are stopped."""

    def __init__(self, cluster, keys):
        self._cluster, self._keys = cluster, keys
        self._replays = []

    def start(self, rate, *, slo_class, seed, max_output=48):
        warp = ",".join(f"{SWING_S * i / 2:g}:{1 + SWING if i % 2 else 1 - SWING:g}" for i in range(60))
        command = [
            *(sys.executable, "-m", "baton", "replay", "synth:mooncake-conversation"),
            *("--url", self._cluster.url, "--rate", str(rate), "--limit", "20000", "--seed", str(seed)),
            *("--length-scale", "1/24", "--output-scale", "1/8", "--max-input", "2500"),
            *("--max-output", str(max_output), "--slo-class", slo_class, "--timeout", "60"),
            *("--tenants", str(len(TENANTS)), "--keys", str(self._keys), "--vocab-size", "512"),
            *("--first-token", "100", "--warp", warp),
        ]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
        self._replays.append(process)
        return process

    def check(self):
        for process in self._replays:
            assert process.poll() is None, "a replay ended: see above"

    def stop(self, process):
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        if process.poll() is None:
            process.kill()
            process.wait()
        self._replays.remove(process)

    def stop_all(self):
        for process in list(self._replays):
            self.stop(process)


def _keys(folder):
    """API keys of the tenants, for the routers and for the replay."""
    book, lines = folder / "keys.toml", []
    for tenant in TENANTS:
        command = [sys.executable, "-m", "baton", "keys", "create", tenant, "--keys", str(book)]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        key = next(word for word in said.split() if word.startswith("sk-"))
        lines.append(f"{tenant} {key}\n")
    keys = folder / "keys.txt"
    keys.write_text("".join(lines))
    return book, keys


DENSE = ("llama", {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8})
MIXTURE = (
    "qwen3_moe",
    {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 64,
        "head_dim": 64,
    },
)


@contextlib.contextmanager
def shown(folder, kind, sizes, *, every_size):
    """A cluster, its load, and a person who looks at it."""
    token = new_token()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-pictures-")))
        name = f"{kind.replace('_', '-')}-demo"
        model = make_model(home / name, kind, initializer_range=0.02, dtype="bfloat16", **sizes)
        book, keys = _keys(home)
        settings = {
            **settings_with_dashboard(home, {"ada": ("operate", token)}, own="ada", classes=CLASSES),
            "engine__kv_bytes": 96 * 2**20,
            "store__host_bytes": 256 * 2**20,
            "router__keys": book,
        }
        secure(Config().tls, AccessConfig(token=str(settings["access__token"])))
        cluster = stack.enter_context(Cluster(model, prefill=1, decode=2, **settings))
        url = dashboard_url(cluster)
        load = Load(cluster, keys)
        stack.callback(load.stop_all)
        person = Person(stack.enter_context(chromium()), url, token, folder, every_size=every_size)
        yield cluster, load, person


def take(folder, *, minutes, rate, over, every_size):
    with shown(folder, *DENSE, every_size=every_size) as (cluster, load, person):
        _normal(person, load, cluster, minutes=minutes, rate=rate)
        _overload(person, load, rate=rate * over)
        _lost_worker(person, cluster)


def take_experts(folder, *, minutes, rate, every_size):
    with shown(folder, *MIXTURE, every_size=every_size) as (_, load, person):
        load.start(3 * rate, slo_class="interactive", seed=1)  # enough for both decode workers
        _pass(minutes * 30)
        load.check()
        person.card("dashboard-experts", "Expert balance")
        if every_size:
            person.card("all-experts-card-dark", "Expert balance", dark=True)
            person.look("all-experts-worker", path="/workers/decode-0")
        person.look_at_all("experts")


def _normal(person, load, cluster, *, minutes, rate):
    load.start(rate, slo_class="interactive", seed=1)
    load.start(rate / 5, slo_class="batch", seed=2, max_output=160)
    _pass(minutes * 30)
    load.check()
    operator = Operator(cluster)
    operator.order(Scale(Role.DECODE, 1))
    _pass(minutes * 10)
    operator.order(Scale(Role.DECODE, 2))
    _pass(minutes * 20)
    for theme in ("light", "dark"):
        size = LAPTOP if theme == "light" else WALL
        person.look(f"dashboard-load-{theme}", size=size, window="5 min", dark=theme == "dark")
    person.record("dashboard-request")
    person.look_at_all("load")
    person.look_at_pages()


def _overload(person, load, *, rate):
    process = load.start(rate, slo_class="interactive", seed=3)
    _pass(90)
    for theme in ("light", "dark"):
        person.look(f"dashboard-overload-{theme}", window="5 min", dark=theme == "dark")
    person.look_at_all("overload")
    load.stop(process)
    _pass(60)


def _lost_worker(person, cluster):
    worker = cluster.worker("decode")
    operator = Operator(cluster)
    psutil.Process(worker.pid).send_signal(signal.SIGSTOP)

    def is_suspect():
        return any(r.state is ReplicaState.SUSPECT for r in operator.state().replicas)

    eventually("it is missed", is_suspect, timeout_s=30)
    person.look("dashboard-lost-worker-light", window="5 min")
    person.look("dashboard-lost-worker-dark", window="5 min", dark=True)
    person.look_at_all("lost-worker")


def _pass(seconds):
    """Wait for the time that the pictures are to show."""
    threading.Event().wait(seconds)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=6.0, help="Of normal load.")
    parser.add_argument("--rate", type=float, default=1.4, help="Requests per second, normally.")
    parser.add_argument("--over", type=float, default=20.0, help="Times that much is too much.")
    parser.add_argument("--of", choices=("all", "experts"), default="all")
    parser.add_argument("--every-size", action="store_true")
    asked = parser.parse_args()
    if shutil.which("pngquant") is None:
        sys.exit("no pngquant: apt-get install pngquant")
    asked.folder.mkdir(parents=True, exist_ok=True)
    common = {"minutes": asked.minutes, "rate": asked.rate, "every_size": asked.every_size}
    if asked.of == "all":
        take(asked.folder, over=asked.over, **common)
    take_experts(asked.folder, **common)


if __name__ == "__main__":
    main()
