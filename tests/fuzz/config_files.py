"""config.json of models and adapters: each gives a spec that makes sense, or one line that refuses it."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from tests.fuzz.harness import Fuzzer, check_message, main

PACKAGES = ("engine.model_files",)
WORDS = (
    *(b"null", b"true", b"[]", b"{}", b'""', b"0", b"-1", b"1e999", b"NaN", b"1000000000", b"0.5", b"9" * 40),
    *(b'"num_hidden_layers":', b'"head_dim":', b'"rope_scaling":', b'"rope_type":"yarn"', b'"dynamic"'),
    *(b'"LlamaForCausalLM"', b'"Gemma3ForCausalLM"', b'"DeepseekV3ForCausalLM"', b'"Qwen3MoeForCausalLM"'),
    *(
        b'"GptOssForCausalLM"',
        b'"Phi3ForCausalLM"',
        b'"quantization_config":',
        b'"layer_types":',
        b'"factor":',
    ),
    *(
        b'"longrope"',
        b'"short_factor":[1]',
        b'"long_factor":[1]',
        b'"partial_rotary_factor":',
        b'"rank_pattern":',
    ),
)


def load() -> Fuzzer:
    import torch

    from baton.config import EngineConfig, ModelConfig
    from baton.core.errors import SetupError
    from engine.model_files.adapter_files import read_adapter
    from engine.model_files.json_files import read_json_object
    from engine.model_files.read_spec import parse_spec
    from engine.model_files.sizes import kv_geometry
    from engine.models.rope import frequencies

    folder = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))
    config = folder / "config.json"
    _write_adapter(folder)
    model, engine, device = ModelConfig(), EngineConfig(), torch.device("cpu")

    def check_model(data: dict[str, Any]) -> None:
        spec = parse_spec(data)
        assert kv_geometry(spec, model, engine).block_bytes > 0
        assert math.isfinite(spec.attention_scale)
        for rope in spec.ropes:
            if rope.rotary_dim <= 4096:
                frequencies(rope, context_tokens=spec.context_tokens, device=device)

    def check(content: bytes) -> None:
        """The first byte says whose config it is: a model's or an adapter's."""
        kind, rest = content[:1], content[1:]
        try:
            if kind == b"a":
                (folder / "adapter_config.json").write_bytes(rest)
                read_adapter(folder, rank_max=64)
                return
            config.write_bytes(rest)
            data = read_json_object(config)
            # transformers reads what has no forward pass here, and takes what it likes.
            if data is not None and "model_type" not in data:
                check_model(data)
        except SetupError as error:
            check_message(error)

    return Fuzzer("config_files", check, WORDS)


def _write_adapter(folder: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    header = {
        name.format("A"): {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
        name.format("B"): {"dtype": "F32", "shape": [4, 2], "data_offsets": [32, 64]},
    }
    text = json.dumps(header).encode()
    file = len(text).to_bytes(8, "little") + text + bytes(64)
    (folder / "adapter_model.safetensors").write_bytes(file)


if __name__ == "__main__":
    main(load, PACKAGES)
