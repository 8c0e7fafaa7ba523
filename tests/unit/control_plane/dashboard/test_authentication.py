"""Authentication: signed-in browsers get the pages, and everybody else gets the login page."""

import asyncio
import contextlib

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from baton.config import Config
from baton.core.tokens import Scope, TokenBook, TokenRecord, digest_of
from baton.files.token_places import new_token
from control_plane.dashboard.authentication import SESSION_KEY, Authentication
from control_plane.dashboard.connections import HeadersInTime
from control_plane.dashboard.process import tokens_of
from control_plane.dashboard.session_file import SessionFile
from control_plane.dashboard.sessions import (
    AGE_S,
    FAILURES_MAX,
    FAILURES_S,
    IDLE_S,
    SESSIONS_MAX,
    SessionStore,
)

ORIGIN = {"origin": "http://baton", "sec-fetch-site": "same-origin"}


class SignInSetup:
    def __init__(self):
        self.now_s = 1000.0
        self.tokens = {"ada": (Scope.OPERATE, new_token()), "vic": (Scope.VIEW, new_token())}

    def book(self):
        return TokenBook(
            [TokenRecord(n, scope, digest_of(token)) for n, (scope, token) in self.tokens.items()]
        )

    def token(self, name):
        return self.tokens[name][1]


@pytest.fixture
def setup():
    return SignInSetup()


@pytest.fixture
def sessions(setup):
    return SessionStore(setup.book, now_s=lambda: setup.now_s)


async def everything(scope, receive, send):
    """An application that answers with the name of the signed-in user."""
    assert scope["type"] == "http"
    name = scope[SESSION_KEY].name.encode()
    headers = [(b"content-type", b"text/plain"), (b"content-security-policy", b"none of ours")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"secrets for " + name})


@pytest.fixture
async def browser(sessions):
    transport = httpx.ASGITransport(app=Authentication(everything, sessions, is_tls=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        yield client


async def signed_in(browser, token):
    return await browser.post("/login", data={"token": token}, headers=ORIGIN)


@pytest.mark.parametrize(
    "path", ["/", "/workers", "/_nicegui/3/static/nicegui.js", "/_nicegui_ws/socket.io/", "/assets/x"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"])
async def test_a_stranger_gets_nothing(browser, path, method):
    answer = await browser.request(method, path, headers={"accept": "text/html"})
    assert answer.status_code in (303, 401)
    assert answer.headers.get("location", "/login") == "/login"
    assert "secrets" not in answer.text


async def test_a_made_up_cookie_is_of_no_use(browser):
    for cookie in ("baton_session=", "baton_session=guess", "baton_session=\x7f; =;;", "x" * 5000):
        answer = await browser.get("/", headers={"cookie": cookie})
        assert answer.status_code == 401


async def test_the_login_page_runs_no_code_and_loads_nothing_from_elsewhere(browser):
    page = await browser.get("/login")
    assert page.status_code == 200
    assert "<script" not in page.text
    assert "http" not in page.text
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert (await browser.get("/sign-in.css")).status_code == 200


async def test_a_token_opens_the_door_until_one_signs_out(browser, setup):
    answer = await signed_in(browser, setup.token("ada"))
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert setup.token("ada") not in cookie
    page = await browser.get("/")
    assert page.text == "secrets for ada"
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert page.headers["content-security-policy"] != "none of ours"
    await browser.post("/logout", headers=ORIGIN)
    assert (await browser.get("/")).status_code == 401


async def test_a_wrong_token_does_not(browser, setup):
    answer = await signed_in(browser, new_token())
    assert answer.status_code == 403
    assert "This token is not known" in answer.text
    assert "set-cookie" not in answer.headers
    assert (await browser.get("/")).status_code == 401


async def test_under_tls_the_cookie_never_travels_without(sessions, setup):
    transport = httpx.ASGITransport(app=Authentication(everything, sessions, is_tls=True))
    async with httpx.AsyncClient(transport=transport, base_url="https://baton") as browser:
        headers = {"origin": "https://baton"}
        answer = await browser.post("/login", data={"token": setup.token("ada")}, headers=headers)
        assert answer.headers["set-cookie"].startswith("__Host-")
        assert "; Secure" in answer.headers["set-cookie"]
        assert (await browser.get("/")).text == "secrets for ada"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://elsewhere"},
        {"sec-fetch-site": "cross-site"},
        {"origin": "null"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_another_site_can_make_a_browser_do_nothing(browser, setup, headers):
    assert (
        await browser.post("/login", data={"token": setup.token("ada")}, headers=headers)
    ).status_code == 403
    await signed_in(browser, setup.token("ada"))
    assert (await browser.post("/anything", headers=headers)).status_code == 403
    await browser.post("/logout", headers=headers)
    assert (await browser.get("/")).text == "secrets for ada", "still signed in"


async def websocket(sessions, headers):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope[SESSION_KEY].name)

    async def receive():
        return {"type": "websocket.connect"}

    sent = []

    async def send(message):
        sent.append(message)

    raw = [(k.encode(), v.encode()) for k, v in {"host": "baton", **headers}.items()]
    scope = {"type": "websocket", "path": "/_nicegui_ws/socket.io/", "headers": raw}
    await Authentication(app, sessions, is_tls=False)(scope, receive, send)
    return seen, sent


async def test_a_websocket_needs_the_same_and_comes_from_our_own_page(sessions, setup):
    secret = sessions.sign_in(setup.token("vic"))
    cookie = {"cookie": f"baton_session={secret}"}
    assert await websocket(sessions, {**cookie, "origin": "http://baton"}) == (["vic"], [])
    for headers in ({}, {"origin": "http://baton"}, {**cookie, "origin": "http://elsewhere"}):
        seen, sent = await websocket(sessions, headers)
        assert seen == []
        assert sent[0]["type"] == "websocket.close"


async def test_a_form_that_is_too_large_is_not_read(browser):
    answer = await browser.post("/login", content=b"token=" + b"x" * 10_000, headers=ORIGIN)
    assert answer.status_code == 413


async def test_who_keeps_trying_wrong_tokens_is_told_to_wait_and_keeps_nobody_out(browser, setup, caplog):
    for _ in range(FAILURES_MAX):
        assert (await signed_in(browser, "wrong")).status_code == 403
    logged = len(caplog.records)
    for _ in range(3):
        assert (await signed_in(browser, "wrong")).status_code == 429
    assert len(caplog.records) == logged == FAILURES_MAX
    # Behind a port-forward, all clients share one address.
    assert (await signed_in(browser, setup.token("ada"))).status_code == 303
    await browser.post("/logout", headers=ORIGIN)
    setup.now_s += FAILURES_S
    assert (await signed_in(browser, "wrong")).status_code == 403


def test_a_session_ends_by_age_by_idleness_and_with_its_token(sessions, setup):
    def fresh():
        secret = sessions.sign_in(setup.token("ada"))
        return secret, sessions.of(secret)

    secret, session = fresh()
    assert session.may_operate
    assert not sessions.of(sessions.sign_in(setup.token("vic"))).may_operate
    setup.now_s += IDLE_S + 1
    assert sessions.of(secret) is None
    secret, _ = fresh()
    for _ in range(int(AGE_S / IDLE_S) + 1):
        setup.now_s += IDLE_S - 1
        sessions.of(secret)
    setup.now_s += IDLE_S - 1
    assert sessions.of(secret) is None
    secret, session = fresh()
    setup.tokens["ada"] = (Scope.OPERATE, new_token())
    assert not sessions.counts(session), "an open page notices, too"
    assert sessions.of(secret) is None


def test_a_token_that_may_do_less_now_ends_its_sessions(sessions, setup):
    secret = sessions.sign_in(setup.token("ada"))
    setup.tokens["ada"] = (Scope.VIEW, setup.token("ada"))
    assert sessions.of(secret) is None


def test_sessions_are_bounded_and_keep_no_secret(sessions, setup):
    secrets = []
    for _ in range(SESSIONS_MAX + 5):
        setup.now_s += 0.001
        secrets.append(sessions.sign_in(setup.token("ada")))
    assert len(sessions._sessions) == SESSIONS_MAX
    assert sessions.of(secrets[0]) is None
    assert sessions.of(secrets[-1]) is not None
    assert not set(secrets) & set(sessions._sessions)
    assert sessions.sign_in("") is None
    assert sessions.sign_in("x" * 10_000) is None


def test_sessions_outlive_the_process(tmp_path, setup):
    path = tmp_path / "sessions.json"

    def started():
        file = SessionFile(path)
        return SessionStore(setup.book, now_s=lambda: setup.now_s, known=file.read(), remember=file.write)

    first = started()
    secret, left = first.sign_in(setup.token("ada")), first.sign_in(setup.token("vic"))
    first.sign_out(left)
    again = started()
    assert again.of(secret).name == "ada"
    assert again.of(left) is None
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in path.read_text()
    path.write_text("nonsense")
    assert started().of(secret) is None
    assert SessionFile(None).read() == {}


def test_a_start_without_tokens_makes_one_that_its_owner_can_read(tmp_path):
    path = tmp_path / "token"
    config = Config.model_validate({"dashboard": {"token_file": str(path)}})
    book, hint = tokens_of(config)
    assert str(path) in hint
    assert path.stat().st_mode & 0o777 == 0o600
    assert book().holder_of(path.read_text().strip(), scope=Scope.OPERATE)
    again, _ = tokens_of(config)
    assert again().records == book().records, "one that comes back knows the same token"


def test_tokens_of_the_configuration_come_first(tmp_path, setup):
    tokens = tmp_path / "tokens.txt"
    tokens.write_text(f"vic view {digest_of(setup.token('vic'))}\n")
    config = Config.model_validate(
        {"access": {"tokens": str(tokens)}, "dashboard": {"token_file": str(tmp_path / "none")}}
    )
    book, _ = tokens_of(config)
    assert book().holder_of(setup.token("vic"), scope=Scope.VIEW) == "vic"
    assert not (tmp_path / "none").exists()
    nobody, hint = tokens_of(Config())
    assert nobody().records == ()
    assert "access.tokens" in hint


@pytest.mark.parametrize(
    "origin", ["http://[", "http://[::1", "null", "//", "http://", "\xff", "http://baton@evil"]
)
async def test_an_origin_that_is_none_is_another_site(browser, setup, origin):
    headers = {"origin": origin.encode("latin-1")}
    answer = await browser.post("/login", data={"token": setup.token("ada")}, headers=headers)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


async def test_a_session_begins_with_a_new_secret_whatever_cookie_came(browser, setup, sessions):
    """A secret that somebody else has put into the browser never becomes a session."""
    browser.cookies.set("baton_session", "planted")
    answer = await signed_in(browser, setup.token("ada"))
    assert answer.status_code == 303
    assert "planted" not in answer.headers["set-cookie"]
    assert sessions.of("planted") is None


async def test_a_connection_without_headers_in_time_is_closed(monkeypatch, sessions):
    monkeypatch.setattr(HeadersInTime, "headers_s", 0.05)
    app = Authentication(everything, sessions, is_tls=False)
    config = uvicorn.Config(app, http=HeadersInTime, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: HeadersInTime(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    port = server.sockets[0].getsockname()[1]
    first = b"GET /health/live HTTP/1.1\r\nHost: baton\r\n\r\n"
    async with server:
        for sent in (b"", b"GET / HTTP/1.1\r\nHost:", first + b"GET / HTTP/1.1\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            with contextlib.suppress(ConnectionResetError):
                heard = await asyncio.wait_for(reader.read(), 10)
                assert heard.startswith(b"HTTP/1.1 200") == sent.startswith(first)
            writer.close()
