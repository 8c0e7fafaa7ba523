"""The parts that the handlers of the public API share."""

import time
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from baton.config.router import RouterConfig, SloConfig
from baton.core.errors import ModelNotFound
from baton.core.messages import AdapterRef
from router.http.authentication import AccessControl
from router.http.observe import RequestRecorder
from router.live.driver import Driver
from router.live.store_lookup import StoreLookup
from router.openai.adapters import Adapters
from router.openai.call import RequestLimits
from router.responses.keeper import LocalResponses, ResponseKeeper
from router.responses.store import StoreBounds
from router.tenants.service_classes import ServiceClasses
from router.text.parsers.select import Parsers
from router.text.tokenizer import Tokenizer


def model_not_found(name: str, known: Sequence[str]) -> ModelNotFound:
    listed = ", ".join(f"`{one}`" for one in known)
    return ModelNotFound(f"The model `{name:.200}` does not exist; this server has {listed:.2000}.")


def _response_bounds(config: RouterConfig) -> StoreBounds:
    return StoreBounds(config.responses_max, config.responses_bytes_max, config.responses_keep_s)


class Service:
    """The parts that serve one model of a router process."""

    def __init__(
        self,
        *,
        config: RouterConfig,
        slo: SloConfig,
        model: str,
        model_path: str,
        driver: Driver,
        tokenizer: Tokenizer,
        observer: RequestRecorder,
        parsers: Parsers,
        adapters: Adapters,
        access: AccessControl,
        store_lookup: StoreLookup | None = None,
        may_sleep: bool = False,
        responses: ResponseKeeper | None = None,
    ) -> None:
        """`may_sleep` says that the model may have no worker while nobody asks for anything. `responses` are
        shared by all models of a router; the service keeps its own if there are none."""
        self.responses = responses or LocalResponses(_response_bounds(config))
        self.config, self.model, self.model_path = config, model, model_path
        self.driver, self.tokenizer, self.observer = driver, tokenizer, observer
        self.parsers, self.adapters = parsers, adapters
        self.classes, self.access = ServiceClasses(slo), access
        self.marker_ids = tokenizer.ids_of_special(parsers.markers)
        """Ids of special tokens that chat parsers must see as text."""
        self.store_lookup, self.may_sleep = store_lookup, may_sleep
        self.created = int(time.time())
        self._salt = config.tenant_salt.encode()

    @property
    def limits(self) -> RequestLimits:
        """Bounds of a request. A sequence is bounded by the model's context and by the capacity of the
        roomiest worker."""
        card, holds = self.tokenizer.card, self.driver.sequence_tokens_max
        if holds is not None and holds < card.context_tokens:
            card = msgspec.structs.replace(card, context_tokens=holds)
        return RequestLimits(
            card=card,
            choices_max=self.config.choices_max,
            default_max_tokens=self.config.default_max_tokens,
        )

    def adapter_of(self, name: str) -> AdapterRef | None:
        """Return the adapter that clients call `name`; None: the base model. Raises ModelNotFound."""
        if name == self.model:
            return None
        if (adapter := self.adapters.get(name)) is not None:
            return adapter.ref
        raise model_not_found(name, (self.model, *self.adapters.names))

    def salt(self, adapter: AdapterRef | None, tenant_salt: bytes = b"") -> bytes:
        """Return the salt of block hashes. It keeps tenants from getting KV computed for others, and adapters
        from KV computed with others. An empty `tenant_salt` means that tenants are not told apart."""
        salt = self._salt
        if tenant_salt:
            salt = blake2b(tenant_salt, key=salt[:64], digest_size=32).digest()
        if adapter is None:
            return salt
        return blake2b(adapter.digest.encode(), key=salt[:64], digest_size=32).digest()

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's fingerprint. It changes when the workers' model, weights or layout do."""
        facts = self.driver.fingerprint or self.model
        return "fp_" + blake2b(facts.encode(), digest_size=5).hexdigest()
