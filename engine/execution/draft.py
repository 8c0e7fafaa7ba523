"""A small model that drafts tokens for the large one.

It keeps its own KV of the sequences it works for, follows what was really sampled, and returns its most
likely continuations. Nothing depends on it but speed: where its KV has gone, or a text is too new to
have been read yet, there are no draft tokens.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tokenizers
import torch

from baton.config import EngineConfig, ModelConfig
from baton.core.errors import SetupError
from baton.core.ids import SeqKey
from baton.core.messages import INFO_NOTE
from baton.core.sampling import finish_after
from baton.core.steps import ItemResult, StepPlan
from engine.kernels.interface import BatchLayout, Span
from engine.loading.load import LoadedModel, load_model
from engine.sampling.ranking import argmax


@dataclass(frozen=True, slots=True)
class DraftRequest:
    key: SeqKey
    count: int
    """Draft tokens wanted, at most."""


@dataclass(slots=True, eq=False)
class _DraftText:
    """One sequence as the draft model knows it."""

    tokens: list[int]
    written: list[int] = field(default_factory=list[int])
    """Tokens whose KV is in the pool, from position 0 on; wrong draft tokens at its end included."""
    blocks: list[int] = field(default_factory=list[int])

    agreed: int = 0
    """Number of `written` tokens that are known to equal `tokens`, counted from the start."""

    def settle(self) -> None:
        """Forget KV of tokens that came otherwise, and of the last one: its logits are wanted again."""
        end = min(len(self.written), len(self.tokens) - 1)
        while self.agreed < end and self.written[self.agreed] == self.tokens[self.agreed]:
            self.agreed += 1
        self.agreed = min(self.agreed, end)
        del self.written[self.agreed :]

    def lose(self) -> list[int]:
        """Its blocks, which others need more."""
        blocks, self.blocks, self.written, self.agreed = self.blocks, [], [], 0
        return blocks


class DraftModel:
    def __init__(self, loaded: LoadedModel, *, vocab: int, step_tokens_max: int) -> None:
        """`vocab` is the vocabulary size of the model that it drafts for."""
        self._loaded, self._vocab, self._step_tokens_max = loaded, vocab, step_tokens_max
        self._known = loaded.spec.vocab_size
        """Rows of the small embedding; the large one may have more, for ids that nothing is written with."""
        self._texts: OrderedDict[SeqKey, _DraftText] = OrderedDict()
        """Least recently used first."""
        self._free = list(range(loaded.kv.block_count))
        self._block_tokens = loaded.kv.geometry.block_tokens

    @classmethod
    def load(cls, model: ModelConfig, engine: EngineConfig, large: LoadedModel) -> "DraftModel":
        """Raises SetupError: none is named, it cannot be loaded, or its vocabulary is another one."""
        if not engine.draft_model:
            raise SetupError("engine.speculation=draft needs engine.draft_model: name a smaller model")
        small = ModelConfig(path=engine.draft_model, device=model.device)
        pool = engine.model_copy(update={"kv_bytes": engine.draft_kv_bytes})
        loaded = load_model(small, pool)
        _check_vocabulary(loaded, large)
        return cls(loaded, vocab=large.spec.vocab_size, step_tokens_max=engine.step_tokens_max)

    @property
    def notes(self) -> tuple[str, ...]:
        """Those in which it differs from a model that runs as fast as it can."""
        return tuple(f"draft model: {note}" for note in self._loaded.notes if not note.startswith(INFO_NOTE))

    def begin(self, key: SeqKey, history: Sequence[int]) -> None:
        """All tokens of a sequence, where it starts here (again)."""
        if any(token >= self._known for token in history):
            self.end([key])
            return
        text = self._texts.get(key)
        if text is None:
            self._texts[key] = _DraftText(list(history))
        else:
            text.tokens, text.agreed = list(history), 0

    def follow(self, key: SeqKey, tokens: Sequence[int]) -> None:
        """They were sampled. Unknown: nothing happens."""
        text = self._texts.get(key)
        if text is None:
            return
        text.tokens.extend(tokens)
        if any(token >= self._known for token in tokens):
            self.end([key])

    def end(self, keys: Iterable[SeqKey]) -> None:
        for key in keys:
            text = self._texts.pop(key, None)
            if text is not None:
                self._free.extend(text.blocks)

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> dict[SeqKey, tuple[int, ...]]:
        """The most likely continuation of each; at most `step_tokens_max` tokens are read at once, so a
        long new text is caught up with over several calls, without draft tokens until then."""
        wanted = self._admit(requests)
        ready: list[tuple[SeqKey, _DraftText, int]] = []
        work: list[tuple[_DraftText, list[int]]] = []
        budget = self._step_tokens_max
        for key, text, count in sorted(wanted, key=lambda one: len(one[1].tokens) - len(one[1].written)):
            chunk = text.tokens[len(text.written) : len(text.written) + budget]
            budget -= len(chunk)
            if not chunk:
                break
            work.append((text, chunk))
            if len(text.written) + len(chunk) == len(text.tokens):
                ready.append((key, text, count))
        drafts: dict[SeqKey, list[int]] = {key: [] for key, _, _ in ready}
        newest = self._compute(work, [text for _, text, _ in ready])
        while ready:
            for (key, _, _), token in zip(ready, newest, strict=True):
                drafts[key].append(token)
            # A token that the large model does not have ends a draft.
            ready = [
                one for one in ready if len(drafts[one[0]]) < one[2] and drafts[one[0]][-1] < self._vocab
            ]
            steps = [(text, drafts[key][-1:]) for key, text, _ in ready]
            newest = self._compute(steps, [text for text, _ in steps])
        return {key: tuple(token for token in found if token < self._vocab) for key, found in drafts.items()}

    def _admit(self, requests: Sequence[DraftRequest]) -> list[tuple[SeqKey, _DraftText, int]]:
        """Those that have, or get, the blocks they need."""
        for request in requests:
            if request.key in self._texts:
                self._texts.move_to_end(request.key)
        keep = {request.key for request in requests}
        admitted: list[tuple[SeqKey, _DraftText, int]] = []
        for key, wanted in ((r.key, r.count) for r in requests):
            text = self._texts.get(key)
            if text is None:
                continue
            count = min(wanted, self._loaded.context_tokens - len(text.tokens))
            need = self._loaded.kv.geometry.blocks_for(len(text.tokens) + count) - len(text.blocks)
            if count < 1 or not self._make_room(need, keep):
                continue
            for block in (self._free.pop() for _ in range(max(0, need))):
                self._loaded.kv.clear(block)
                text.blocks.append(block)
            text.settle()
            admitted.append((key, text, count))
        return admitted

    def _make_room(self, need: int, keep: set[SeqKey]) -> bool:
        """Takes the KV of texts that nobody asks for now, least recently used first."""
        for key, text in self._texts.items():
            if len(self._free) >= need:
                break
            if key not in keep and text.blocks:
                self._free.extend(text.lose())
        return len(self._free) >= need

    def _compute(
        self, work: Sequence[tuple[_DraftText, list[int]]], ready: Sequence[_DraftText]
    ) -> list[int]:
        """Writes the KV of each text's next tokens; the most likely next token of those that are ready."""
        if not work:
            return []
        spans = [self._span(text, len(tokens)) for text, tokens in work]
        layout = BatchLayout.of(spans)
        flat: list[int] = []
        last_rows: dict[int, int] = {}
        for index in layout.order:
            text, tokens = work[index]
            flat.extend(tokens)
            last_rows[id(text)] = len(flat) - 1
            text.written.extend(tokens)
        device = self._loaded.kv.device
        rows = [last_rows[id(text)] for text in ready]
        model = self._loaded.model
        hidden = model.forward(
            torch.tensor(flat, dtype=torch.int64, device=device),
            layout,
            torch.tensor(rows, dtype=torch.int64, device=device),
        )
        return argmax(model.logits(hidden)).tolist() if rows else []

    def _span(self, text: _DraftText, count: int) -> Span:
        start = len(text.written)
        blocks = self._loaded.kv.geometry.blocks_for(start + count)
        return Span(start, count, tuple(text.blocks[:blocks]))


def with_drafts(draft: DraftModel, plan: StepPlan, results: tuple[ItemResult, ...]) -> tuple[ItemResult, ...]:
    """The results with the draft tokens that their items want."""
    draft.end(plan.ended)
    requests: list[DraftRequest] = []
    for item, result in zip(plan.items, results, strict=True):
        if not result.tokens:
            continue
        if item.history is not None:
            draft.begin(item.key, item.history)
        draft.follow(item.key, result.tokens)
        count = (item.sample_index or 0) + len(result.tokens)
        if item.want_drafts and finish_after(item.sampling, result.tokens[-1], count) is None:
            requests.append(DraftRequest(item.key, item.want_drafts))
    drafts = draft.draft(requests)
    return tuple(
        msgspec.structs.replace(result, drafts=drafts[item.key]) if item.key in drafts else result
        for item, result in zip(plan.items, results, strict=True)
    )


def _check_vocabulary(small: LoadedModel, large: LoadedModel) -> None:
    """The same ids must mean the same text; sizes may differ by padding alone."""
    ours, theirs = _vocabulary(small.folder), _vocabulary(large.folder)
    is_same = ours == theirs if ours and theirs else small.spec.vocab_size == large.spec.vocab_size
    if not is_same:
        raise SetupError(
            f"the draft model {small.folder} has another vocabulary than {large.folder}: "
            "engine.draft_model must be of the same family"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Empty: not known."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return {}
    try:
        return tokenizers.Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises nothing finer
        raise SetupError(f"{file} cannot be read: {error}") from error
