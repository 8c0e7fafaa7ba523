"""An operator of a cluster in a test, and streams that must not notice the orders."""

import threading

from baton.core.operate import Order, Outcome
from baton.wire.operate import OperateClient
from tests.integration.cluster import eventually, loop


class Operator:
    def __init__(self, cluster):
        lines = (line for line in cluster.log if "control plane at " in line)
        self.address = next(lines).rsplit("control plane at ", 1)[1].split(",")[0]

    def _call(self, name, *args):
        async def call():
            client = OperateClient(self.address)
            try:
                return await getattr(client, name)(*args)
            finally:
                await client.close()

        return loop().run(call())

    def state(self):
        return self._call("state")

    def order(self, action, *, timeout_s=120.0):
        """Give an order and wait until it is over."""
        decision = self._call("order", Order(action, "test", "because"))
        assert decision.outcome in (Outcome.ACCEPTED, Outcome.DONE), decision  # some orders are done at once

        def over():
            found = [d for d in self.state().decisions if d.number == decision.number]
            return found[0] if found and found[0].outcome is not Outcome.ACCEPTED else None

        ended = eventually(f"{action} is over", over, timeout_s=timeout_s)
        assert ended.outcome is Outcome.DONE, ended
        return ended


class Streams:
    """Requests one after the other in threads of their own until the block ends. Each must have the text of
    an undisturbed request."""

    def __init__(self, cluster, count=2, tokens=48):
        self.cluster, self.tokens = cluster, tokens
        self.prompts = [f"Once upon a time there was a number {i}, and " for i in range(count)]
        self.expected = {
            p: cluster.complete(p, max_tokens=tokens)["choices"][0]["text"] for p in self.prompts
        }
        self.texts, self.errors = [], []
        self.done = threading.Event()
        self.threads = [threading.Thread(target=self._run, args=(p,), daemon=True) for p in self.prompts]

    def _run(self, prompt):
        while not self.done.is_set():
            try:
                parts = self.cluster.stream(prompt, max_tokens=self.tokens)
                text = "".join(event["choices"][0]["text"] for event in parts if event["choices"])
                self.texts.append((prompt, text))
            except Exception as error:
                self.errors.append(error)
                return

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        for thread in self.threads:
            thread.join(120)
        assert self.errors == []
        assert len(self.texts) >= len(self.prompts)
        assert [t for p, t in self.texts if t != self.expected[p]] == []
