"""Quick encoders of the tokenizers, built some seconds after the workers are there.

fastokens takes 0.8 s of a core for a vocabulary of 49,000 words (AMD EPYC Zen 3, 2026-11-30), which workers
that start on the same machine need for their models, and then for the first answer. Until it is ready the
tokenizers library does the work.
"""

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from baton.core.messages import MembershipView
from engine.model_files.host_memory import give_back_free_memory
from router.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""Longest time for which workers are waited for."""
FIRST_ANSWER_S = 3.0
"""Time that the first answer gets after the workers are there."""


class QuickTokenizers:
    def __init__(self, tokenizers: Mapping[str, Tokenizer], *, workers: int) -> None:
        """`workers` is the number of workers that the cluster starts with; 0: not known, or there already."""
        self._tokenizers, self._workers = tokenizers, workers
        self._is_time = asyncio.Event()
        if not workers:
            self._is_time.set()

    def on_view(self, view: MembershipView) -> None:
        if len(view.members) >= self._workers and not self._is_time.is_set():
            asyncio.get_running_loop().call_later(FIRST_ANSWER_S, self._is_time.set)

    async def run(self) -> None:
        """Wait for the workers, and give each tokenizer its quick encoder, if it may have one."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_time.wait(), WAIT_S)
        for name, tokenizer in self._tokenizers.items():
            await asyncio.to_thread(tokenizer.become_quick)
            why_not = tokenizer.why_not_quick
            how = f"the tokenizers library: no quick tokeniser, {why_not}" if why_not else "fastokens"
            log.info("prompts for %s are tokenised by %s", name, how)
        await asyncio.to_thread(give_back_free_memory)
