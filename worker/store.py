"""A worker's side of the store, as its process holds it: session, copies, and what is shown of them."""

from collections.abc import Callable

from baton.core.messages import INFO_NOTE
from baton.core.store import StoreHello, StoreToWorker, StoreWelcome, WorkerToStore
from worker import events as e
from worker.store_copier import OpenCopies, StoreCopier
from worker.store_link import StoreLink


class WorkerStore:
    """The store of this host. Without a socket (`path` empty) there is no store, and nothing is sent."""

    def __init__(
        self,
        path: str,
        *,
        hello: StoreHello,
        open_copies: OpenCopies,
        block_count: int,
        post: Callable[[e.WorkerEvent], None],
    ) -> None:
        self._path, self._post = path, post
        self._copier = StoreCopier(open_copies, block_count=block_count, post=post)
        self._link = StoreLink(path, hello=hello, sink=self, arena_user=self._copier)
        self._node_id, self._slot_count = "", 0

    @property
    def is_configured(self) -> bool:
        return bool(self._path)

    async def run(self) -> None:
        """Hold the session for as long as the worker serves. Cancelling ends the session, after the last
        copy."""
        await self._link.run()

    def close(self) -> None:
        """Unmap the arena, after `run` has ended."""
        self._copier.close()

    # --- actions ----------------------------------------------------------------------------------

    def send(self, message: WorkerToStore) -> None:
        self._link.send(message)

    def copy_to_store(self, copy: e.CopyToStore) -> None:
        self._copier.to_store(copy)

    def copy_from_store(self, copy: e.CopyFromStore) -> None:
        self._copier.from_store(copy)

    # --- what the session says --------------------------------------------------------------------

    def store_joined(self, welcome: StoreWelcome) -> None:
        self._node_id, self._slot_count = welcome.node_id, welcome.slot_count
        self._post(e.StoreJoined(welcome))

    def from_store(self, message: StoreToWorker) -> None:
        self._post(e.FromStore(message))

    def store_lost(self) -> None:
        self._slot_count = 0
        self._post(e.StoreLost())

    # --- what is told -----------------------------------------------------------------------------

    def notes(self) -> tuple[str, ...]:
        """Notes for `Member.notes`."""
        if not self._path:
            return ()
        if self._link.is_joined:
            return (f"{INFO_NOTE}KV store node {self._node_id} keeps blocks in host memory",)
        if not self._link.trouble:
            return ()  # nothing is known yet
        return (f"no KV store for now, everything is computed: {self._link.trouble}",)

    def accounts(self) -> dict[str, float]:
        return {
            "store.joined": float(self._link.is_joined),
            "store.sessions": float(self._link.session_count),
            "store.slots": float(self._slot_count),
        }
