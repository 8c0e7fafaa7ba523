"""Tool calls, reasoning and adapters through a real server and the openai package."""

import json

import openai
import pytest

from baton.core.sampling import GrammarKind
from router.text.tokenizer import Tokenizer
from tests.unit.router import http_fakes
from tests.unit.router.http_fakes import MODEL, FakeWorker, make_folder

TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined %}"
    "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}{% endif %}{% endif %}"
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "get_time"}}
USER = [{"role": "user", "content": "Weather?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = make_folder(tmp_path_factory.mktemp("model") / "tiny")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def cluster(folder, *workers, **fields):
    return http_fakes.cluster(folder, *workers, context=1024, **fields)


@pytest.fixture(scope="module")
def ids(folder):
    rust = Tokenizer.load(str(folder))._rust
    return lambda text: rust.encode(text, add_special_tokens=False).ids


def decoded(c, start):
    return c.router.models.first.tokenizer.decode(list(start.tokens))


async def ask(c, *, stream=False, **fields):
    """Return (content, reasoning, [(name, arguments)], finish reason)."""
    body = {"model": MODEL, "messages": USER, "max_tokens": 150, "tools": [WEATHER, TIME]} | fields
    answer = await c.openai().chat.completions.create(**body, stream=stream)
    if not stream:
        choice = answer.choices[0]
        calls = [(t.function.name, t.function.arguments) for t in choice.message.tool_calls or []]
        reasoning = (choice.message.model_extra or {}).get("reasoning_content") or ""
        return choice.message.content or "", reasoning, calls, choice.finish_reason
    content, reasoning, calls, reason, ids = "", "", [], None, []
    async for chunk in answer:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            if call.function.name:
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
                ids.append(call.id)
            calls[call.index][1] += call.function.arguments or ""
    assert len(set(ids)) == len(ids)
    return content, reasoning, [tuple(call) for call in calls], reason


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_are_parsed_by_the_family_that_the_template_shows(folder, ids, stream):
    async with cluster(folder, FakeWorker(reply=ids(f"I look. {CALL}\n{CALL}"))) as c:
        content, _, calls, reason = await ask(c, stream=stream)
        assert (content, reason) == ("I look.", "tool_calls")
        assert [(name, json.loads(text)) for name, text in calls] == [("get_weather", {"city": "Köln"})] * 2
        assert '<tools>{"type": "function"' in decoded(c, c.worker.started[0])
        assert (await ask(c, stream=stream, parallel_tool_calls=False))[2] == calls[:1]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_calls_are_content(folder, ids, stream):
    bad = '<tool_call>{"name": "launch", "arguments": {}}</tool_call>'
    async with cluster(folder, FakeWorker(reply=ids(bad))) as c:
        assert await ask(c, stream=stream) == (bad, "", [], "stop")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_is_a_grammar_and_the_text_its_arguments(folder, ids, stream):
    named = {"type": "function", "function": {"name": "get_weather"}}
    async with cluster(folder, FakeWorker(reply=ids('{"city": "Ulm"}'))) as c:
        found = await ask(
            c,
            stream=stream,
            tool_choice=named,
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
        assert found == ("", "", [("get_weather", '{"city": "Ulm"}')], "tool_calls")
        grammar = c.worker.started[0].sampling.grammar
        checked = PARAMETERS | {"additionalProperties": False}
        assert (grammar.kind, json.loads(grammar.text)) == (GrammarKind.JSON_SCHEMA, checked)


async def test_required_calls_are_a_list_of_those_that_there_are(folder, ids):
    text = '[{"name": "get_weather", "parameters": {"city": "Ulm"}}]'
    async with cluster(folder, FakeWorker(reply=ids(text))) as c:
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        found = await ask(c, tool_choice="required", parallel_tool_calls=False, extra_body=extra)
        assert found == ("", "", [("get_weather", '{"city": "Ulm"}')], "tool_calls")
        schema = json.loads(c.worker.started[0].sampling.grammar.text)
        assert (schema["minItems"], schema["maxItems"]) == (1, 1)
        names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
        assert names == ["get_weather", "get_time"]


async def test_strict_functions_are_enforced_where_they_may_be_called(folder, ids):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    async with cluster(folder, FakeWorker(reply=ids("no"))) as c:
        await ask(c, tools=[strict])
        grammar = c.worker.started[0].sampling.grammar
        assert grammar.kind is GrammarKind.STRUCTURAL_TAG
        assert "get_weather" in grammar.text
        bad = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}
        with pytest.raises(openai.BadRequestError):
            await ask(c, tools=[bad])


async def test_no_tools_are_shown_to_a_model_that_may_not_call(folder, ids):
    async with cluster(folder, FakeWorker(reply=ids(CALL))) as c:
        assert (await ask(c, tool_choice="none"))[0] == CALL
        assert "<tools>" not in decoded(c, c.worker.started[0])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Ulm"}', '{"city": "Ulm"}'),
        ('{"city": "\\ud800"}', '{"city": "\ufffd"}'),
        ('{"\\uD83D\\uDE00": "\\\\ud800", "b": "\\udc00\\ud800x"}',
         '{"\U0001f600": "\\\\ud800", "b": "\ufffd\ufffdx"}'),
    ],
)  # fmt: skip
async def test_answers_to_calls_reach_the_template(folder, ids, arguments, shown):
    function = {"name": "get_weather", "arguments": arguments}
    messages = [
        *USER,
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    async with cluster(folder, FakeWorker(reply=ids("ok"))) as c:
        await ask(c, messages=messages)
        assert decoded(c, c.worker.started[0]).endswith(
            f'[assistant]<tool_call>{{"name": "get_weather", "arguments": {shown}}}</tool_call>'
            "[tool]rain[assistant]"
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("thinks", "text", "content", "reasoning"),
    [
        (None, "<think>\nhm\n</think>\n\nHi", "Hi", "hm"),
        (None, "Hi", "Hi", ""),
        (True, "hm</think>Hi", "Hi", "hm"),
        (False, "Hi </think>", "Hi </think>", ""),
    ],
)
async def test_reasoning_is_told_from_the_answer(folder, ids, stream, thinks, text, content, reasoning):
    async with cluster(folder, FakeWorker(reply=ids(text))) as c:
        extra = {} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}
        assert (await ask(c, stream=stream, extra_body=extra))[:2] == (content, reasoning)
        hidden = await ask(c, stream=stream, extra_body=extra | {"include_reasoning": False})
        assert hidden[:2] == (content, "")


# --- adapters -------------------------------------------------------------------------------------


def make_adapter(path, *, rank=2, hidden=64, seed=0, target="q_proj", scale=1.0):
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    random = torch.Generator().manual_seed(seed)
    name = f"base_model.model.model.layers.0.self_attn.{target}"
    save_file(
        {
            f"{name}.lora_A.weight": torch.randn(rank, hidden, generator=random),
            f"{name}.lora_B.weight": torch.randn(64, rank, generator=random) * scale,
        },
        path / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": [target]}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


async def test_adapters_are_models_while_they_are_loaded(folder, ids, tmp_path):
    one, other = make_adapter(tmp_path / "one"), make_adapter(tmp_path / "other", seed=1)
    async with cluster(folder, FakeWorker(reply=ids("Hi"))) as c, c.http() as http:
        load = {"lora_name": "sql", "lora_path": str(one), "load_inplace": None}
        for _ in range(2):  # Loading it again changes nothing.
            assert (await http.post("/v1/load_lora_adapter", json=load)).status_code == 200
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"], card["root"]) for card in cards] == [
            (MODEL, None, str(folder)), ("sql", MODEL, str(one)),
        ]  # fmt: skip
        for model in (MODEL, "sql"):
            answer = await c.openai().completions.create(model=model, prompt="x")
            assert answer.model == model
        plain, adapted = c.worker.started
        assert (plain.adapter, adapted.adapter.name, adapted.adapter.path) == (None, "sql", str(one))
        assert plain.cache_root != adapted.cache_root
        taken = await http.post("/v1/load_lora_adapter", json=load | {"lora_path": str(other)})
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
        replaced = load | {"lora_path": str(other), "load_inplace": True}
        assert (await http.post("/v1/load_lora_adapter", json=replaced)).status_code == 200
        await c.openai().completions.create(model="sql", prompt="x")
        assert c.worker.started[-1].cache_root not in (plain.cache_root, adapted.cache_root)
        for status in (200, 404):
            assert (
                await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
            ).status_code == status
        with pytest.raises(openai.NotFoundError):
            await c.openai().completions.create(model="sql", prompt="x")


async def test_configured_adapters_are_there_from_the_start(folder, tmp_path):
    spec = f"sql={make_adapter(tmp_path / 'one')}"
    async with (
        cluster(folder, FakeWorker(reply=[7]), model={"adapters": [spec]}, adapter_loading=False) as c,
        c.http() as http,
    ):
        assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == [MODEL, "sql"]
        assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 400


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"hidden": 32}, 400, "another base model"),
        ({"rank": 65}, 400, "adapter_rank_max"),
        ({"target": "embed_tokens"}, 400, "target module"),
        ({"scale": float("nan")}, 400, "q_proj.lora_B.weight has numbers that are not finite"),
        (None, 404, "does not exist"),
    ],
)
async def test_adapters_that_do_not_fit(folder, tmp_path, changes, status, words):
    path = tmp_path / "one" if changes is None else make_adapter(tmp_path / "one", **changes)
    async with cluster(folder, FakeWorker(reply=[7])) as c, c.http() as http:
        answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(path)})
        assert answer.status_code == status
        assert words in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "lora_path"


async def test_beam_search_through_the_api(folder, ids):
    """The fake's likeliest token is always its reply's; the alternatives are less likely by whole units."""
    async with cluster(folder, FakeWorker(reply=ids("Paris is"))) as c:
        answer = await c.openai().completions.create(
            model=MODEL,
            prompt="x",
            n=2,
            max_tokens=3,
            temperature=0,
            top_p=1,
            extra_body={"use_beam_search": True, "ignore_eos": True, "top_k": -1, "min_p": 0},
        )
        assert len(answer.choices) == 2
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 6
        assert {s.sampling.max_tokens for s in c.worker.started} == {1}
        assert len(c.worker.started) == 1 + 2 + 2


async def test_a_grammar_begins_after_the_reasoning_and_after_what_the_template_left_open(tmp_path):
    from transformers import PreTrainedTokenizerFast

    folder = make_folder(tmp_path / "thinks")
    pretrained = PreTrainedTokenizerFast.from_pretrained(folder)
    pretrained.add_tokens(["<think>", "</think>"])
    pretrained.chat_template = TEMPLATE
    pretrained.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": len(pretrained)}))
    closing = pretrained.convert_tokens_to_ids("</think>")
    reply = pretrained.encode('hm</think>{"a": 1}', add_special_tokens=False)
    form = {"type": "json_object"}
    async with cluster(folder, FakeWorker(reply=reply)) as c:
        for thinks, after, content, reasoning in (
            (True, (closing,), '{"a": 1}', "hm"),
            (
                None,
                (closing,),
                '{"a": 1}',
                "hm",
            ),  # The model may think; only the text after that is the answer.
            (False, (), 'hm</think>{"a": 1}', ""),
        ):
            c.worker.started.clear()
            extra = {} if thinks is None else {"chat_template_kwargs": {"enable_thinking": thinks}}
            found = await ask(c, tools=[], response_format=form, extra_body=extra)
            assert found[:2] == (content, reasoning)
            assert c.worker.started[0].sampling.grammar.after_token_ids == after


OTHER_CALL = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    "before",
    [
        [],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        [{"role": "assistant", "content": None, "tool_calls": [OTHER_CALL]}],
    ],
)
async def test_a_result_of_no_call_is_a_400_that_names_it(folder, before):
    async with cluster(folder, FakeWorker()) as c, c.http() as http:
        messages = [*before, {"role": "tool", "tool_call_id": "1", "content": "rain"}]
        answer = await http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"messages[{len(before)}].tool_call_id"
    assert "answers no tool call" in answer.json()["error"]["message"]


async def test_half_of_a_surrogate_pair_in_a_body_is_a_400(folder):
    async with cluster(folder, FakeWorker()) as c, c.http() as http:
        messages = [{"role": "user", "content": "HALF"}]
        body = json.dumps({"model": MODEL, "messages": messages}).replace("HALF", r"\ud800")
        answer = await http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
