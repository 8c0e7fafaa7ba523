"""What workers leave out of torch, and get back for models that need it."""

import subprocess
import sys

from tests.gguf_files import write_gguf
from tests.models import make_model


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_worker_does_not_load_what_only_exporters_need():
    run("""
from engine.lean_torch import import_torch
import sys
import_torch("cpu")
import worker.process, worker.expert_rank, worker.stage_follower
left_out = {"torch._meta_registrations", "torch.export", "torch._dynamo"}
assert not left_out & set(sys.modules), left_out & set(sys.modules)
""")


def test_what_was_left_out_comes_when_it_is_asked_for():
    run("""
from engine.lean_torch import complete_torch, import_torch
import_torch("cpu")
import torch
empty = torch.empty(3, 4, device="meta")
try:
    torch.nn.functional.scaled_dot_product_attention(*(empty[None, None],) * 3)
except NotImplementedError:
    pass
else:
    raise AssertionError("torch knows this without its registrations: nothing is left out")
complete_torch()
assert torch.nn.functional.scaled_dot_product_attention(*(empty[None, None],) * 3).shape == (1, 1, 3, 4)
exported = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
assert isinstance(exported, torch.export.ExportedProgram)
""")


def test_a_torch_that_is_there_already_stays_whole():
    run("""
import torch
from engine.lean_torch import complete_torch, import_torch
import_torch("cpu")
assert type(torch.export).__name__ == "module"
complete_torch()
""")


def test_a_model_of_transformers_modules_loads_in_such_a_process(tmp_path):
    folder = make_model(tmp_path / "m", "olmo2", with_tokenizer=False)
    run(f"""
from engine.lean_torch import import_torch
import sys
import_torch("cpu")
from baton.config import EngineConfig, ModelConfig
from engine.execution.executor import Executor
assert "torch._meta_registrations" not in sys.modules
model = ModelConfig(path={str(folder)!r}, dtype="float32")
Executor.load(model, EngineConfig(kv_bytes=2**20, threads=1))
assert "torch._meta_registrations" in sys.modules
""")


def test_a_gguf_file_loads_in_such_a_process(tmp_path, monkeypatch):
    """Its tokenizer is converted by transformers."""
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    file = write_gguf(make_model(tmp_path / "m", "llama"), tmp_path / "m.gguf")
    run(f"""
from engine.lean_torch import import_torch
import_torch("cpu")
from baton.config import EngineConfig, ModelConfig
from engine.execution.executor import Executor
Executor.load(ModelConfig(path={str(file)!r}), EngineConfig(kv_bytes=2**20, threads=1))
""")


def test_on_a_gpu_torch_is_whole():
    run("""
from engine.lean_torch import import_torch
import sys
import_torch("cuda")
import torch
assert "torch._meta_registrations" in sys.modules and type(torch.export).__name__ == "module"
""")
