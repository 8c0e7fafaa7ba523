"""Numbers of tokens that each layer's router sent to each of its experts.

The steps add to a tensor on the device, in place, so that nothing waits for it and a recorded CUDA graph goes
on counting when it is replayed. The host reads the tensor now and then.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Counts = npt.NDArray[np.int64]
"""[L, E]: L layers with experts, E experts."""


class ExpertCounts:
    """Owned by the thread that computes. A token counts once for each expert that it is sent to, in every
    layer; the expert that all tokens pass is none of these, and padding is no token. The last layer computes
    only those rows of a step that are asked for, and counts no others."""

    def __init__(self, layers: tuple[int, ...], expert_count: int, device: torch.device) -> None:
        """layers: which of the model's have experts."""
        self.layers, self.expert_count = layers, expert_count
        shape = (len(layers), expert_count)
        self._counts = torch.zeros(shape, dtype=torch.int64, device=device)
        self._rows = [self._counts[row] for row in range(len(layers))]
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._host: Tensor | None = None
        if device.type == "cuda":
            self._host = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._copied: torch.cuda.Event | None = None

    def add(self, row: int, chosen: Tensor, is_token: Tensor | None) -> None:
        """row: of `layers`. chosen: int64 [T, k], the experts of each token. is_token: int64 [T], 0 for
        padding, else 1; None: there is no padding."""
        each = self._one.expand(chosen.numel())
        if is_token is not None:
            each = is_token[:, None].expand(chosen.shape).reshape(-1)
        self._rows[row].scatter_add_(0, chosen.reshape(-1), each)

    def take(self) -> Tensor:
        """The counts so far, int64 [L, E], for somebody else to `put`. They begin anew."""
        taken = self._counts.clone()
        self._counts.zero_()
        return taken

    def put(self, counts: Tensor) -> None:
        """Add what `take` returned."""
        self._counts += counts

    def reset(self) -> None:
        """Forget what was counted so far, since it did not come from requests."""
        self._counts.zero_()
        self._copied = None

    def read(self) -> Counts | None:
        """The counts so far. On a GPU nobody waits for them: they are as of the previous call, and None while
        the device has not got there."""
        if self._host is None:
            return self._counts.numpy().copy()
        found: Counts | None = None
        if self._copied is not None:
            if not self._copied.query():
                return None
            found = self._host.numpy().copy()
        self._host.copy_(self._counts, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(self._counts.device))
        return found
