"""Hostile chat templates and conversations: rendered in time, or refused in one line, within the sandbox."""

import contextlib
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tests.fuzz.harness import Fuzzer, check_message, main, seeds_of

PACKAGES = ("router.text", "jinja2")
SEPARATOR = b"\x00"
"""It stands between the template and the body of the request."""
CANARY = "canary-7f3a"
"""A text in the environment and in the modules of the router. No prompt may contain it."""
DEADLINE_S = 0.5
WORDS = (
    *(b"{{ ", b" }}", b"{% ", b" %}", b"{%- ", b" -%}", b"{# ", b" #}", SEPARATOR),
    *(b"{% for m in messages %}", b"{% endfor %}", b"{% if true %}", b"{% else %}", b"{% endif %}"),
    *(b"{% set x = [] %}", b"{% set x %}", b"{% endset %}", b"{% macro f(a) %}", b"{% endmacro %}", b"f(f)"),
    *(b"{% generation %}", b"{% endgeneration %}", b"{% break %}", b"{% continue %}", b"{% filter upper %}"),
    *(b"namespace(a=1)", b"range(99999)", b"raise_exception('x')", b"strftime_now('%c')", b"lipsum(9)"),
    *(
        b"messages",
        b"tools",
        b"documents",
        b"bos_token",
        b"loop.index",
        b"self",
        b"cycler(1, 2)",
        b"joiner()",
    ),
    *(b"m.content", b"m['role']", b"none", b"'x' * 999999", b"10 ** 99", b" ~ ", b" + ", b" % ", b"// 0"),
    *(
        b"|tojson",
        b"|tojson(indent=4)",
        b"|join(', ')",
        b"|map('upper')",
        b"|list",
        b"|length",
        b"|indent(4)",
    ),
    *(b"|replace('', 'xx')", b"|center(9999999)", b"|format(1)", b"|attr('__class__')", b"|sum(start=[])"),
    *(b".__class__", b".__mro__[1].__subclasses__()", b".__init__.__globals__", b"['__builtins__']"),
    *(b"{% include '/etc/passwd' %}", b"{% import 'os' as os %}", b"{% extends x %}", b"open('/etc/passwd')"),
    *(b"'{0.__class__}'.format(1)", b".format_map(m)", b".ljust(9999999)", b".translate({120: 'yy'})"),
    *(
        b'{"role": "user", "content": "hi"}',
        b'"tool_calls": []',
        b'"tools": []',
        b'"chat_template_kwargs": {}',
    ),
    *(b"\\ud800", b"\xf0\x9f\x98\x80", b'"continue_final_message": true', b'"add_generation_prompt": false'),
)
FORBIDDEN = ("open", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "urllib.", "pty.")
"""Beginnings of the names of audit events that no rendering may cause."""


class _Audit:
    """Notes what a thread does to the machine while it renders."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._thread = 0
        sys.addaudithook(self._on_event)

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        # Python looks for the source of what it warns of, and jinja names all templates so.
        is_source = event == "open" and args[0] == "<template>"
        if threading.get_ident() == self._thread and event.startswith(FORBIDDEN) and not is_source:
            self.events.append(f"{event} {args!r:.200}")

    def begin(self) -> None:
        self.events, self._thread = [], threading.get_ident()

    def end(self) -> list[str]:
        self._thread = 0
        return self.events


def load() -> Fuzzer:
    from baton.core.errors import ClientError, SetupError
    from router.openai.call import RequestLimits
    from router.openai.requests import parse_chat
    from router.text import template_bounds, tokenizer
    from router.text.tokenizer import Tokenizer
    from tests.models import save_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))
    save_tokenizer(folder)
    (folder / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8,'
        ' "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 512,'
        ' "max_position_embeddings": 65536, "eos_token_id": 1}'
    )
    template_bounds.LOOP_S = template_bounds.THREAD_S = DEADLINE_S
    tokenizer.THREAD_S = DEADLINE_S
    os.environ["BATON_FUZZ_CANARY"] = CANARY
    vars(tokenizer)["CANARY"] = vars(template_bounds)["CANARY"] = CANARY
    loaded = Tokenizer.load(str(folder))
    pretrained = loaded._pretrained  # pyright: ignore[reportPrivateUsage]
    limits = RequestLimits(loaded.card, 16, 256)
    body = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    audit = _Audit()

    def render(source: str, body: bytes) -> str:
        pretrained.chat_template = source
        tokenizer._check_templates(pretrained, folder)  # pyright: ignore[reportPrivateUsage]
        call = parse_chat(body, limits)
        tools = [tool.declared for tool in call.tools.tools]
        prompt = loaded.chat_prompt(call.messages, tools=tools, template=call.template)
        return loaded.decode(list(prompt.tokens)) + prompt.end

    for seed in seeds_of("templates"):  # Whatever is imported lazily is imported now.
        source, _, asked = seed.partition(SEPARATOR)
        with contextlib.suppress(ClientError, SetupError):
            render(source.decode(), asked)

    def check(content: bytes) -> None:
        """The template comes first, and after a zero byte the request, which may be left out."""
        source, _, rest = content.partition(SEPARATOR)
        audit.begin()
        text = ""
        try:
            text = render(source.decode("utf-8", "replace"), rest or body)
        except (ClientError, SetupError) as error:
            check_message(error)
            text = str(error)
        finally:
            touched = audit.end()
        assert not touched, touched
        assert CANARY not in text or CANARY.encode() in content

    return Fuzzer("templates", check, WORDS)


if __name__ == "__main__":
    main(load, PACKAGES)
