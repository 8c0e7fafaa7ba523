"""Writes the first inputs of the fuzzers; those of findings are added by hand.

Run it as `python -m tests.fuzz.make_corpus`. Its output is committed.
"""

import json
import tempfile
from pathlib import Path

import msgspec

from tests.fuzz.harness import CORPUS


def main() -> None:
    _gguf()
    _safetensors()
    _configs()
    _traces()
    _wire()
    _dashboard()
    _kv_server()
    _templates()


def _put(fuzzer: str, name: str, content: bytes) -> None:
    folder = CORPUS / fuzzer
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


def _gguf() -> None:
    import gguf
    import numpy as np

    for name, architecture in (
        ("llama", "llama"),
        ("gemma3", "gemma3"),
        ("phi3", "phi3"),
        ("moe", "qwen3moe"),
    ):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "a.gguf"
            writer = gguf.GGUFWriter(path, architecture)
            for key, value in (("block_count", 2), ("embedding_length", 8), ("context_length", 64)):
                writer.add_uint32(f"{architecture}.{key}", value)
            for key, value in (
                ("head_count", 2),
                ("head_count_kv", 1),
                ("key_length", 4),
                ("sliding_window", 4),
            ):
                writer.add_uint32(f"{architecture}.attention.{key}", value)
            writer.add_uint32(f"{architecture}.feed_forward_length", 16)
            writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
            writer.add_float32(f"{architecture}.rope.freq_base", 10_000.0)
            writer.add_array("tokenizer.ggml.tokens", ["<s>", "a"])
            writer.add_array("tokenizer.ggml.scores", [0.0, 1.0])
            if name == "moe":
                for key in ("expert_count", "expert_used_count", "expert_feed_forward_length"):
                    writer.add_uint32(f"{architecture}.{key}", 2)
            writer.add_tensor("token_embd.weight", np.zeros((2, 8), np.float32))
            if name == "llama":
                writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            _put("gguf", name, path.read_bytes())


def _safetensors() -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }
    text = json.dumps(header).encode()
    _put("safetensors", "file", b"f" + len(text).to_bytes(8, "little") + text + bytes(32))
    whole = {"a": {"dtype": "F32", "shape": [1024], "data_offsets": [0, 4096]}}
    _put("safetensors", "header", b"h" + json.dumps(whole).encode())
    index = {"metadata": {"total_size": 0}, "weight_map": {"a": "part.safetensors"}}
    _put("safetensors", "index", b"i" + json.dumps(index).encode())
    for name, place in (("up", "../x"), ("absolute", "/etc/passwd"), ("dots", ".."), ("null", "a\0b")):
        _put("safetensors", f"index-{name}", b"i" + json.dumps({"weight_map": {"a": place}}).encode())


BASE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024, "rope_type": "yarn"},
    "dynamic": {"factor": 2.0, "rope_type": "dynamic"},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}


def _configs() -> None:
    architectures = (
        *("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma", "Gemma2", "Gemma3", "Mixtral"),
        *("Qwen2Moe", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "GptOss"),
    )
    for name in architectures:
        config = {"architectures": [f"{name}ForCausalLM"], **BASE, "num_key_value_heads": 2}
        _put("config_files", f"model-{name}", b"m" + json.dumps(config).encode())
    for name, rope in ROPES.items():
        config = {"architectures": ["LlamaForCausalLM"], **BASE, "rope_scaling": rope}
        _put("config_files", f"rope-{name}", b"m" + json.dumps(config).encode())
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": {"q_proj": 2}, "bias": "none"}
    _put("config_files", "adapter", b"a" + json.dumps(adapter).encode())
    schemes = {
        "gptq": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"},
        "awq": {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True},
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    for name, scheme in schemes.items():
        config = {"architectures": ["LlamaForCausalLM"], **BASE, "quantization_config": scheme}
        _put("config_files", f"quantised-{name}", b"m" + json.dumps(config).encode())


def _traces() -> None:
    mooncake = {"timestamp": 27, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    bailian = {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 1.5,
        "input_length": 30,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": [1, 2],
    }
    _put("trace_files", "mooncake", b"t" + (json.dumps(mooncake) + "\n").encode() * 2)
    _put("trace_files", "bailian", b"t" + (json.dumps(bailian) + "\n").encode() * 2)
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930,2162,5\n"
    _put("trace_files", "azure", b"t" + azure.encode())
    burst = (
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,API log\n"
    )
    _put("trace_files", "burstgpt", b"t" + burst.encode())
    _put("trace_files", "records", b'r{"schema":"baton-records/1","settings":{}}\n{}\n')
    _put("trace_files", "report", b'r{"schema":"baton-report/1"}')
    _put("trace_files", "packed", b"z\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03")


def _wire() -> None:
    from baton.core.hashing import HASH_BYTES
    from baton.core.ids import BlockHash
    from baton.core.store import BlockFacts
    from kv_store.ssd.layout import Label, Title, encode_label, encode_title
    from kv_transfer.backends.tcp import TcpOffer

    for number in range(120):
        _put("wire", f"reader-{number:03}", bytes([number, 10, 4, 8, 1, 16, 1, 18, 0]))
    offer = TcpOffer(1, "127.0.0.1", 4711, b"t" * 16, 4096, 8)
    _put("wire", "offer", bytes([6]) + msgspec.msgpack.encode(offer))
    _put(
        "wire",
        "sessions",
        bytes([7]) + b'{"a":{"name":"x","scope":"view","token_digest":"","began_s":0,"used_s":0}}',
    )
    _put("wire", "title", bytes([8]) + encode_title(Title(b"i" * 16, 4096, 4096)))
    facts = BlockFacts(BlockHash(b"h" * HASH_BYTES), BlockHash(b"p" * HASH_BYTES), 16, "tenant")
    _put("wire", "label", bytes([8]) + encode_label(Label(3, 1, 4096, 7, facts), b"i" * 16))


def _dashboard() -> None:
    head = "host: baton\norigin: http://baton\nsec-fetch-site: same-origin\naccept: text/html\n"
    for name, first, body in (
        ("page", "GET /workers", ""),
        ("sign-in", "POST /login", "token=bt-unknown"),
        ("sign-out", "POST /logout", ""),
        ("socket", "WS /_nicegui_ws/socket.io/", ""),
        ("cookie", 'GET /\ncookie: baton_session=planted; other="a"', ""),
    ):
        _put("dashboard", name, f"r{first}\n{head}\n\n{body}".encode())
    page = 'baton_requests_total{model="m",outcome="ok"} 3\nbaton_running_sequences 2\n# HELP x y\n'
    _put("dashboard", "metrics", b"m" + page.encode())


def _kv_server() -> None:
    whole = b"k\x01" + (2).to_bytes(4, "little") + (0).to_bytes(4, "little") + (3).to_bytes(4, "little")
    _put("kv_server", "read", whole)
    numbers = (1, 0, 2, 0, 0, 8, 0, 32, 0, 16, 0)
    ranges = b"".join(number.to_bytes(4, "little") for number in numbers)
    _put("kv_server", "ranges", b"k\x03" + ranges)
    _put("kv_server", "stranger", b"sGET / HTTP/1.1\r\nHost: somebody\r\n\r\n")
    _put("kv_server", "greeting", b"sBKVT\x02\x00" + b"x" * 16)


def _templates() -> None:
    loop = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    start = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    hermes = (
        "{% if tools %}{% for t in tools %}{{ t|tojson(indent=2) }}\n{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
        "({{ c.function.arguments|tojson }}){% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    user = {"role": "user", "content": "hi"}
    plain = {"model": "m", "messages": [user]}
    tools = plain | {
        "messages": [
            user,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
        "tools": [{"type": "function", "function": function}],
        "chat_template_kwargs": {"x": [1]},
    }
    doubling = (
        "{% set ns = namespace(a='x') %}{% for i in range(40) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}"
        "{% set t %}{{ ns.a }}{{ ns.a }}{% endset %}"
    )
    macro = "{% macro f(a, b=1) %}{{ a * b }}{% endmacro %}{{ f('x', 3) }}{{ f(f('y'), 2)|upper }}"
    methods = (
        "{{ 'a'.center(9) }}{{ 'ab'.replace('a', 'b') }}{{ '%s|%02d' % ('a', 1) }}{{ '{:>4}'.format('a') }}"
        "{{ ', '.join(['a', 'b']) }}{{ 'xy'.translate({120: 'z'}) }}{{ 'a\nb'|indent(2) }}"
        "{{ [1, 2, 3]|batch(2, 0)|list }}{{ messages|map(attribute='role')|join(',') }}"
    )
    escape = (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ self.__init__.__globals__ }}"
        "{{ messages|attr('append') }}{{ cycler.__init__ }}{{ lipsum.__globals__['os'] }}"
    )
    for name, template, asked in (
        ("chat", "{{ bos_token }}" + loop + start, plain),
        ("tools", hermes, tools),
        ("doubling", doubling, plain),
        ("macro", macro, plain),
        ("methods", methods, plain),
        ("escape", escape, plain),
        ("endless", "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, plain),
        ("refusal", "{{ raise_exception('roles must alternate') }}", plain),
        ("include", "{% include '/etc/passwd' %}{% import 'os' as os %}", plain),
    ):
        _put("templates", name, template.encode() + b"\0" + json.dumps(asked).encode())
    bare = plain | {"continue_final_message": True, "add_generation_prompt": False}
    _put("templates", "continued", loop.encode() + b"\0" + json.dumps(bare).encode())


if __name__ == "__main__":
    main()
