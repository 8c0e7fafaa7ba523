"""The login page: plain HTML, no code. Pure."""

from html import escape

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Baton: sign in</title>
<link rel="stylesheet" href="/sign-in.css">
<link rel="icon" href="data:,">
<main>
<h1>Baton</h1>
<p>Sign in to view this cluster, and to operate it if your token allows that.</p>
{trouble}<form method="post" action="/login">
<label for="token">Token</label>
<input id="token" name="token" type="password" autocomplete="current-password" maxlength="512"
 required autofocus>
<button>Sign in</button>
</form>
<p class="hint">{hint}</p>
</main>
</html>
"""

HINT = (
    "Tokens are made with <code>baton tokens create NAME --scope view</code> or <code>--scope operate</code>."
)


def sign_in_page(trouble: str, hint: str) -> bytes:
    """Return the page. `trouble` says what went wrong, and `hint` where the token of this start is. Both are
    plain text."""
    alert = f'<p class="trouble" role="alert">{escape(trouble)}</p>\n' if trouble else ""
    return _PAGE.format(trouble=alert, hint=escape(hint) if hint else HINT).encode()
