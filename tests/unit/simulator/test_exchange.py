"""The server of simulated clients does what the real one does."""

import asyncio

from simulator.faults.exchange import Exchange

START = {"type": "http.response.start", "status": 200, "headers": []}
PIECE = {"type": "http.response.body", "body": b"data", "more_body": True}


async def test_whoever_waits_to_write_goes_on_when_the_client_leaves():
    """uvicorn resumes writing when a connection is lost. A request that waited for its reader instead would
    keep what it has reserved for as long as the reader would have taken."""
    exchange = Exchange({}, now_s=lambda: 0.0)
    exchange.stop_reading()
    await exchange.send(START)
    await exchange.send(PIECE)
    second = asyncio.create_task(exchange.send(PIECE))
    await asyncio.sleep(0)
    assert not second.done()
    exchange.leave()
    await asyncio.wait_for(second, 10)
    assert exchange.text == b"data"  # What comes after the client left goes nowhere.
