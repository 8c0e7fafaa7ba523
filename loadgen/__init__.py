"""`baton replay` replays production traces, open loop, against any OpenAI endpoint."""
