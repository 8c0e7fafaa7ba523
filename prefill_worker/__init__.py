"""The prefill phase's own decisions: who may read which full blocks, and until when."""
