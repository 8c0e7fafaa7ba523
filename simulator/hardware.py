"""Devices from their data sheets, and what a step of a model costs there by the roofline.

A step takes the longer of computing and of reading the weights, plus attention, plus a fixed overhead
(Williams, Waterman, Patterson, "Roofline", CACM 2009). `StepCosts` is linear, so it is laid through the two
points that matter: a step that only decodes, and one full chunk of a prompt.

Kernels do not reach what a data sheet promises: `Efficiency` says what share is assumed, and is the first
thing to replace by a measurement (`baton bench engine`, or the costs that a running worker reports).
"""

from dataclasses import dataclass

from baton.core.costs import StepCosts
from baton.core.errors import SetupError
from baton.core.messages import Role
from simulator.models import ModelShape

GB, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device. Figures are dense, without structured sparsity; links are per direction."""

    name: str
    bf16_flops: float
    """Dense operations per second in BF16."""
    fp8_flops: float
    """Dense operations per second in FP8; 0 when there are none."""
    memory_bytes: float
    memory_bytes_s: float
    peer_bytes_s: float
    """Bytes per second to the other GPUs of its node (NVLink, Infinity Fabric; PCIe where there is
    neither)."""
    host_bytes_s: float
    """Bytes per second to host memory."""


def _gpu(
    name: str, *, bf16: float, fp8: float, memory_gb: float, memory_gb_s: float, peer_gb_s: float,
    host_gb_s: float,
) -> Gpu:  # fmt: skip
    return Gpu(
        name, bf16 * TERA, fp8 * TERA, memory_gb * GB, memory_gb_s * GB, peer_gb_s * GB, host_gb_s * GB
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA A10, L4 and L40S data sheets: no NVLink, PCIe 4.0 x16.
        _gpu("a10", bf16=125, fp8=0, memory_gb=24, memory_gb_s=600, peer_gb_s=32, host_gb_s=32),
        _gpu("l4", bf16=121, fp8=242, memory_gb=24, memory_gb_s=300, peer_gb_s=32, host_gb_s=32),
        _gpu("l40s", bf16=362, fp8=733, memory_gb=48, memory_gb_s=864, peer_gb_s=32, host_gb_s=32),
        # NVIDIA A100 80GB SXM data sheet.
        _gpu("a100", bf16=312, fp8=0, memory_gb=80, memory_gb_s=2039, peer_gb_s=300, host_gb_s=32),
        # NVIDIA H100 and H200 SXM data sheets (half of the figures with sparsity).
        _gpu("h100", bf16=989, fp8=1979, memory_gb=80, memory_gb_s=3350, peer_gb_s=450, host_gb_s=64),
        _gpu("h200", bf16=989, fp8=1979, memory_gb=141, memory_gb_s=4800, peer_gb_s=450, host_gb_s=64),
        # The export versions: H800 is an H100 with less NVLink, H20 one with less arithmetic.
        _gpu("h800", bf16=989, fp8=1979, memory_gb=80, memory_gb_s=3350, peer_gb_s=200, host_gb_s=64),
        _gpu("h20", bf16=148, fp8=296, memory_gb=96, memory_gb_s=4000, peer_gb_s=450, host_gb_s=64),
        # NVIDIA HGX B200 data sheet, an eighth of the eight.
        _gpu("b200", bf16=2250, fp8=4500, memory_gb=180, memory_gb_s=8000, peer_gb_s=900, host_gb_s=64),
        # AMD Instinct MI300X data sheet.
        _gpu("mi300x", bf16=1307, fp8=2615, memory_gb=192, memory_gb_s=5300, peer_gb_s=448, host_gb_s=64),
    )
}


NIC_BYTES_S = 50 * GB
"""One network card of 400 Gbit/s per GPU, in bytes per second."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of what the data sheet says, and fixed times."""

    flops: float = 0.55
    """Share reached by dense matrix products in prompts of a thousand tokens and more."""
    attention_flops: float = 0.4
    memory: float = 0.75
    link: float = 0.85
    step_s: float = 0.002
    """Fixed time of any step: planning, launching, sampling."""
    all_reduce_s: float = 1.2e-5
    """Latency of one all-reduce within a node; there are two per layer with tensor parallelism."""
    kernel_s: float = 3e-6
    """Time from the end of a kernel's work to the beginning of the next one's, in a CUDA graph."""
    message_s: float = 1.5e-5
    """Latency of sending rows to many ranks, however few."""
    forwarding_share: float = 24 / 132
    """Share of the multiprocessors that pass rows on between network and NVLink: DeepEP's default."""


def find_gpu(name: str) -> Gpu:
    """Find a GPU by its name. Raises SetupError when it is unknown."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise SetupError(f"no data sheet of a GPU called {name!r}; there are: {', '.join(sorted(GPUS))}")
    return gpu


@dataclass(frozen=True, slots=True)
class Node:
    """The hardware of one worker: a model over `tensor` × `pipeline` GPUs of one kind."""

    model: ModelShape
    gpu: Gpu
    tensor: int = 1
    pipeline: int = 1
    weight_bytes: float = 2.0
    """Bytes per parameter: 2 for bf16, 1 for fp8 or int8."""
    kv_element_bytes: float = 2.0
    efficiency: Efficiency = Efficiency()
    nic_bytes_s: float = NIC_BYTES_S
    """Bytes per second of each GPU's network card."""

    @property
    def gpu_count(self) -> int:
        return self.tensor * self.pipeline

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.kv_bytes_per_token(element_bytes=self.kv_element_bytes)

    @property
    def weights_in_memory(self) -> float:
        """Bytes of weights over all its GPUs."""
        return self.model.weights * self.weight_bytes

    def kv_pool_bytes(self, *, use: float = 0.9, activations: float = 2 * GB) -> float:
        """Return what is left for KV over all its GPUs: `use` of the memory, less weights and `activations`
        bytes on each. Raises SetupError when the model does not fit."""
        left = self.gpu_count * (self.gpu.memory_bytes * use - activations) - self.weights_in_memory
        if left < 1024 * self.kv_bytes_per_token:
            raise SetupError(
                f"{self.model.name} takes {self.weights_in_memory / GB:.0f} GB, and {self.gpu_count} × "
                f"{self.gpu.name} hold {self.gpu_count * self.gpu.memory_bytes / GB:.0f} GB: "
                "take more per worker"
            )
        return left

    @property
    def transfer_bytes_s(self) -> float:
        """Bytes per second between two workers of different hosts."""
        return self.gpu_count * self.nic_bytes_s * self.efficiency.link

    @property
    def host_bytes_s(self) -> float:
        """Bytes per second between its pool and host memory."""
        return self.gpu_count * self.gpu.host_bytes_s * self.efficiency.link

    def step_s(self, *, prompt_tokens: int, decodes: int, context_tokens: int, pairs: int) -> float:
        """Return the seconds of a step by the roofline, at pipeline 1."""
        tokens = prompt_tokens + decodes
        if tokens == 0:
            return 0.0
        share = self.efficiency
        flops = self._flops * share.flops * self.tensor
        memory = self.gpu.memory_bytes_s * share.memory * self.tensor
        compute_s = 2 * self.model.weights_used * tokens / flops
        weights_s = self._weights_read(tokens) * self.weight_bytes / memory
        attention_flops = self.gpu.bf16_flops * share.attention_flops * self.tensor
        decode_s = self.model.layers * self.model.decode_pair_flops * context_tokens / attention_flops
        kv_s = max(decode_s, context_tokens * self.kv_bytes_per_token / memory)
        attention_s = self.model.layers * self.model.prompt_pair_flops * pairs / attention_flops
        return max(compute_s, weights_s) + kv_s + attention_s + self._overhead_s(tokens)

    def costs(self, role: Role, *, chunk_tokens: int = 2048) -> StepCosts:
        """Return costs that are linear through a step of few decodes, one of many, and one full chunk of a
        prompt.

        A pipeline computes as many batches at once as it has stages: chunks of prompts leave it that much
        faster, and each decode step carries only its part of the batch, past all the weights.
        """
        few, many = 1, 128
        few_s = self.step_s(prompt_tokens=0, decodes=few, context_tokens=0, pairs=0)
        decode_s = (self.step_s(prompt_tokens=0, decodes=many, context_tokens=0, pairs=0) - few_s) / (
            many - few
        )
        base_s = few_s - few * decode_s
        chunk_s = self.step_s(prompt_tokens=chunk_tokens, decodes=0, context_tokens=0, pairs=0)
        unit = 1_000_000

        def more_s(**more: int) -> float:
            work = {"prompt_tokens": 1, "decodes": 0, "context_tokens": 0, "pairs": 0}
            return (self.step_s(**{**work, **more}) - self.step_s(**work)) / unit

        stages = self.pipeline
        return StepCosts(
            base_s=base_s if role is not Role.PREFILL else base_s / stages,
            prompt_token_s=max(0.0, chunk_s - base_s) / chunk_tokens / stages,
            decode_s=decode_s / stages,
            context_token_s=more_s(context_tokens=unit) / stages,
            pair_s=more_s(pairs=unit) / stages,
        )

    @property
    def _flops(self) -> float:
        is_small = self.weight_bytes <= 1 and self.gpu.fp8_flops > 0
        return self.gpu.fp8_flops if is_small else self.gpu.bf16_flops

    def _weights_read(self, tokens: int) -> float:
        """Return the parameters that a step reads; of experts, those that at least one token is sent to."""
        model = self.model
        if not model.experts:
            return model.weights_used
        unused = (1 - model.experts_used / model.experts) ** tokens
        return model.weights_with(model.experts * (1 - unused))

    def _overhead_s(self, tokens: int) -> float:
        share = self.efficiency
        if self.tensor == 1:
            return share.step_s
        # A ring moves 2·(n-1)/n of the activations per all-reduce; two all-reduces per layer.
        moved = 2 * (self.tensor - 1) / self.tensor * tokens * self.model.hidden * 2
        each_s = share.all_reduce_s + moved / (self.gpu.peer_bytes_s * share.link)
        return share.step_s + 2 * self.model.layers * each_s
