"""`baton replay`: production traces, replayed open loop against any OpenAI endpoint."""
