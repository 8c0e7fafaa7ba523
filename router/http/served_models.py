"""The models that one router serves, and the choice of the model that a request names."""

from collections.abc import Iterator, Sequence

import msgspec

from baton.core.errors import ModelNotFound
from router.http.service import Service, model_not_found


class _Named(msgspec.Struct):
    model: str


_named = msgspec.json.Decoder(_Named)


class Models:
    """One `Service` per model. Their adapters are models too, and no two models have one name."""

    def __init__(self, services: Sequence[Service]) -> None:
        assert services, "a router has a model"
        self._services = {service.model: service for service in services}
        for service in services:
            service.adapters.is_taken = self._is_taken

    def __iter__(self) -> Iterator[Service]:
        return iter(self._services.values())

    def __len__(self) -> int:
        return len(self._services)

    @property
    def first(self) -> Service:
        return next(iter(self._services.values()))

    @property
    def names(self) -> list[str]:
        """Names that a request may ask for: each model, and its adapters."""
        return [name for service in self for name in (service.model, *service.adapters.names)]

    def of(self, name: str) -> Service:
        """Return the service of the model or adapter `name`. Raises ModelNotFound."""
        if (service := self._services.get(name)) is not None:
            return service
        for service in self:
            if service.adapters.get(name) is not None:
                return service
        raise model_not_found(name, self.names)

    def asked_for(self, body: bytes) -> Service | None:
        """Return the service that a request's body asks for. None: the body names no model.

        Raises ModelNotFound.
        """
        try:
            named = _named.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return self.of(named.model)

    def _is_taken(self, name: str, by: str) -> bool:
        """Return whether the name belongs to anything but an adapter of the model `by`."""
        try:
            owner = self.of(name)
        except ModelNotFound:
            return False
        return owner.model == name or owner.model != by
